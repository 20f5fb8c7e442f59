"""One URL: what can be asked of one engine, over its two lanes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import (
    Experts,
    Facts,
    LoadReading,
    error_text,
    model_experts,
    model_vocab,
    unknown_load,
)
from rolloutsync.errors import (
    EngineHTTPError,
    Phase,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
)
from rolloutsync.payload import parse_answer, parse_json
from rolloutsync.transport import Lane, Reply, Transport

if TYPE_CHECKING:
    from rolloutsync.clock import Clock
    from rolloutsync.config import ClientConfig
    from rolloutsync.dialects.base import Call, Dialect
    from rolloutsync.errors import Cut
    from rolloutsync.order import Group
    from rolloutsync.payload import JsonPath
    from rolloutsync.sample import Prompt, Segment

_USER_AGENT = "rolloutsync"


class Engine:
    """One inference server. Thread-safe; every call blocks for at most its deadline.

    All calls raise ``TransportError`` where the exchange broke, ``EngineHTTPError`` for an error answer and
    ``ProtocolError`` for an answer that cannot be right, each naming this engine.

    Attributes:
        front: Where its generates go: its own URL, or that of a router, which several engines then share.
        fixed_limit: The most requests that it takes at once, whatever it says and the user wants; None for no such.
    """

    fixed_limit: int | None = None

    def __init__(self, url: str, transport: Transport, dialect: Dialect, config: ClientConfig, clock: Clock) -> None:
        self.url = self.front = url
        self.dialect = dialect
        self._transport = transport
        self._config = config
        self._clock = clock
        self.facts = self._with_model(Facts())
        self._header_sets: dict[tuple[bool, bool], dict[str, str]] = {}
        self._load_call = 0  # index of the load call that this engine answers

    # --- generate: the data lane ---

    def generate(
        self,
        prompt: Prompt,
        rid: str,
        *,
        deadline: Deadline,
        dp_rank: int | None = None,
        fresh: bool = False,
        group: Group | None = None,  # noqa: ARG002 - a router wants to know what belongs together
    ) -> Segment:
        """Generate one sample's tokens; blocks until the engine has them all, or ``deadline``."""
        call = self.dialect.encode_generate(prompt, rid, facts=self.facts, dp_rank=dp_rank)
        with self._exchange(call, Lane.DATA, deadline, rid=rid, fresh=fresh) as reply:
            try:
                with self._transport.turn_for(reply):
                    return self._decode(call, reply, prompt, rid)
            except ProtocolError as error:
                reply.distrust()
                error.engine, error.rid = self.url, rid
                raise

    def _decode(self, call: Call, reply: Reply, prompt: Prompt, rid: str) -> Segment:
        self._check_status(call, reply, rid)
        answer = self._json(call, reply, self.dialect.large_fields(prompt))
        return self.dialect.decode_generate(answer, prompt, rid, self.facts, self._config.routed_experts_dtype)

    def cut(self, reason: Cut, *, rid: str | None = None) -> int:
        """Shut the sockets of our generates here (of one rid, or all), which wakes their threads."""
        return self._transport.cut(
            lambda e: e.engine == self.url and e.lane is Lane.DATA and rid in {None, e.rid}, reason
        )

    # --- everything else: the control lane ---

    def call(self, call: Call, *, deadline: Deadline | None = None, fresh: bool = False) -> Any:
        """Make one control call, never re-sent; its JSON, or its text where it is not JSON."""
        timeouts = self._config.timeouts
        seconds = timeouts.long_control_s if call.long else timeouts.control_s
        limit = Deadline.after(self._clock, seconds if deadline is None else deadline.within(seconds))
        with self._exchange(call, Lane.CONTROL, limit, fresh=fresh) as reply:
            self._check_status(call, reply, None)
            try:
                return parse_json(reply.body)
            except ValueError:
                return reply.body.decode("utf-8", "replace")

    def abort(self, rid: str | None, *, deadline: Deadline | None = None) -> None:
        """Abort one request, or all with None. The answer proves receipt, not the end.

        The abort of one request is sent a second time where its connection broke: it can do no harm twice.
        """
        try:
            self.call(self.dialect.abort(rid), deadline=deadline)
        except TransportError as error:
            if rid is None or error.cut is not None or error.phase not in {Phase.RACE, Phase.SENT, Phase.BODY}:
                raise
            self.call(self.dialect.abort(rid), deadline=deadline, fresh=True)

    def load(self, *, deadline: Deadline | None = None) -> LoadReading:
        """Read the load. An answer that makes no sense is an UNKNOWN reading; only transport errors raise."""
        calls = self.dialect.load_calls()
        for number in range(self._load_call, len(calls)):
            try:
                answer = self.call(calls[number], deadline=deadline)
            except UnsupportedError:
                continue
            except EngineHTTPError as error:
                return unknown_load(str(error))
            self._load_call = number
            return self.dialect.read_load(calls[number], answer, self.facts.dp_size or 1)
        return unknown_load(f"this engine has none of {[call.path for call in calls]}")

    def learn(self) -> Facts:
        """Ask what the engine is, and keep it. A facts call that it refuses or lacks leaves the facts unknown."""
        for call in self.dialect.facts_calls():
            try:
                answer = self.call(call)
            except UnsupportedError:
                continue
            self.facts = self._with_model(self.dialect.read_facts(answer))
            break
        with contextlib.suppress(EngineHTTPError):  # a key that may not ask this, or an engine that cannot tell
            version = self.dialect.read_version(self.call(self.dialect.version_call()))
            self.facts = replace(self.facts, weight_version=version or self.facts.weight_version)
        return self.facts

    def heard_version(self, version: str | None) -> None:
        """Note the weight version that an answer named."""
        if version is not None and version != self.facts.weight_version:
            self.facts = replace(self.facts, weight_version=version)

    def scheduler_answers(self, deadline: Deadline) -> bool:
        """Whether a call that goes through the scheduler is answered, whatever it says. One it lacks counts as such."""
        for call in self.dialect.facts_calls():
            try:
                self.call(call, deadline=deadline)
            except UnsupportedError:
                continue
            except EngineHTTPError:
                return True
            except TransportError as error:
                return error.phase is Phase.LOCAL  # our own shortage says nothing about the engine
            except RolloutError:
                return False
            return True
        return True

    def is_reachable(self) -> bool:
        """Whether it answers the cheapest call there is, whatever it says."""
        try:
            self.call(self.dialect.version_call())
        except EngineHTTPError:
            return True
        except RolloutError:
            return False
        return True

    def _with_model(self, facts: Facts) -> Facts:
        """Add what the model's ``config.json`` says, where its path is readable here, and the user's own shape."""
        config = _read_config(facts.model_path)
        experts = model_experts(config)
        if self._config.routed_experts_shape is not None:
            layers, topk = self._config.routed_experts_shape
            experts = Experts(layers=layers, topk=topk, count=experts.count)
        return replace(facts, experts=experts, vocab_size=facts.vocab_size or model_vocab(config))

    # --- one exchange ---

    def _exchange(
        self, call: Call, lane: Lane, deadline: Deadline, *, rid: str | None = None, fresh: bool = False
    ) -> Reply:
        return self._transport.exchange(
            method=call.method,
            url=self.url + call.path,
            headers=self._headers(call),
            body=call.body,
            lane=lane,
            engine=self.url,
            deadline=deadline,
            rid=rid,
            fresh=fresh,
        )

    def _headers(self, call: Call) -> dict[str, str]:
        headers = self._header_sets.get((call.admin, call.body is None))
        return headers or self._make_headers(admin=call.admin, empty=call.body is None)

    def _make_headers(self, *, admin: bool, empty: bool) -> dict[str, str]:
        headers = {"User-Agent": _USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"}
        if not empty:
            headers["Content-Type"] = "application/json"
        key = (self._config.admin_api_key if admin else None) or self._config.api_key
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self._header_sets.setdefault((admin, empty), headers)

    def _check_status(self, call: Call, reply: Reply, rid: str | None) -> None:
        status = reply.status
        if 200 <= status < 300:
            return
        words = error_text(reply.body)
        hint = f" (to {reply.headers.get('Location')!r}; redirects are not followed)" if 300 <= status < 400 else ""
        kind = UnsupportedError if status in {404, 405} else EngineHTTPError
        raise kind(
            f"{call.method} {call.path} answered {status}{hint}: {words}",
            engine=self.url,
            rid=rid,
            status=status,
            retry_after=reply.headers.get("Retry-After"),
            paused=self.dialect.says_paused(status, reply.body),
        )

    def _json(self, call: Call, reply: Reply, large: tuple[JsonPath, ...]) -> Any:
        try:
            return parse_answer(reply.body, large)
        except ValueError:
            start = error_text(reply.body[:300])
            raise ProtocolError(
                f"{call.path} answered {reply.status} with something that is not JSON: {start}"
            ) from None


def _read_config(model_path: str | None) -> dict[str, Any]:
    if model_path is None:
        return {}
    try:
        config = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
