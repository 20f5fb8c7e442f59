"""One URL: calls to the server there, and what it is found to be."""

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
    error_text,
    merged,
    model_experts,
    model_vocab,
)
from rolloutsync.dialects.every import BY_NAME
from rolloutsync.dialects.family import PROBES, Family
from rolloutsync.errors import (
    EngineHTTPError,
    Phase,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
    WrongServerError,
)
from rolloutsync.payload import parse_answer, parse_json
from rolloutsync.recognition import recognise
from rolloutsync.transport import Lane

if TYPE_CHECKING:
    from rolloutsync.clock import Clock
    from rolloutsync.config import ClientConfig
    from rolloutsync.dialects.base import Call, Dialect
    from rolloutsync.payload import LargeField
    from rolloutsync.transport import Reply, Transport

_USER_AGENT = "rolloutsync"
_DEAD = 503
_UNSURE = "the server did not say what it is (GET /version, /workers, /model_info) and was taken for SGLang"


class Endpoint:
    """An inference server's URL. Thread-safe; every call blocks for at most its deadline.

    All calls raise ``TransportError`` where the exchange broke, ``EngineHTTPError`` for an error answer and
    ``ProtocolError`` for an answer that cannot be right, each naming this engine.

    Args:
        url: Its base URL.
        transport: Makes the exchanges.
        dialect: What it speaks; None finds that out before anything else is sent there.
        config: Of the client.
        clock: Time.

    Attributes:
        front: Where its generates go: its own URL, or that of a router, which several engines then share.
        fixed_limit: The most requests that it takes at once, whatever it says and the user wants; None for no such.
        known: It was asked what it is.
    """

    fixed_limit: int | None = None

    def __init__(
        self, url: str, transport: Transport, dialect: Dialect | None, config: ClientConfig, clock: Clock
    ) -> None:
        self.url = self.front = url
        self.dialect: Dialect = dialect or BY_NAME["sglang"]
        self.known = self._sure = dialect is not None  # known: as far as it says what it is
        self._given = self.known
        self.owed: tuple[Call, ...] = ()  # calls that end what an abort began, and did not work so far
        self._lacking: frozenset[str] = frozenset()  # paths that it does not have, where there are others
        self._transport = transport
        self._config = config
        self._clock = clock
        self.facts = self._with_model(Facts())
        self._header_sets: dict[tuple[bool, bool, tuple[tuple[str, str], ...]], dict[str, str]] = {}
        self._load_call = 0  # index of the load call that this engine answers

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

    def is_reachable(self) -> bool:
        """Whether it answers the cheapest call there is, whatever it says."""
        try:
            self.call(self.dialect.reach_call() if self.known else PROBES[0])
        except EngineHTTPError:
            return True
        except RolloutError:
            return False
        return True

    def has_died(self) -> bool:
        """Whether it says that it has died, or nobody is there any more. Not where it cannot tell."""
        call = self.dialect.health
        if call is None:
            return False
        try:
            self.call(call)
        except EngineHTTPError as error:
            return error.status == _DEAD
        except TransportError as error:
            return error.cut is None and error.phase is not Phase.LOCAL
        return False

    # --- what it is ---

    def know(self, deadline: Deadline | None = None) -> None:
        """Find out what answers here, unless that is known already; before that nothing else may be sent.

        Raises:
            WrongServerError: Not an engine.
            TransportError: It does not answer.
        """
        if not self.known:
            self._recognise(deadline)

    def _recognise(self, deadline: Deadline | None = None) -> None:
        if self._given:
            return
        found = recognise(lambda call: self.call(call, deadline=deadline))
        if found is Family.ROUTER:
            advice = f"use RolloutClient.from_router({self.url!r}), or the URLs of its engines"
            raise WrongServerError(f"{self.url} is a router, not an engine: {advice}", engine=self.url)
        before = self.dialect
        if found is not None or not self._sure:
            self.dialect = BY_NAME[(found or Family.SGLANG).value]
        if self.dialect is not before:
            self.facts, self._load_call = self._with_model(Facts()), 0
        self.known, self._sure = True, self._sure or found is not None

    def learn(self) -> Facts:
        """Ask what the engine is, and keep it. A facts call that it refuses or lacks leaves the facts unknown.

        Also what it speaks is asked anew: another server may have taken its place.

        Raises:
            WrongServerError: Not an engine.
        """
        self._lacking = frozenset()
        self._recognise()
        for call in self.dialect.facts_calls():
            try:
                answer = self.call(call)
            except UnsupportedError:
                continue
            self._note(self._more(self.dialect.read_facts(answer)))
            break
        self._sure = self._sure or self.facts.version is not None
        with contextlib.suppress(EngineHTTPError):  # a key that may not ask this, or an engine that cannot tell
            version = self.dialect.read_version(self.call(self.dialect.version_call()))
            self.facts = replace(self.facts, weight_version=version or self.facts.weight_version)
        return self.facts

    def _note(self, facts: Facts) -> None:
        """Take facts for true. Of an engine that cannot tell its weights' label we remember the one that we gave it."""
        label = None if self.dialect.weights.keeps_label(facts) else self.facts.weight_version
        self.facts = self._with_model(replace(facts, weight_version=facts.weight_version or label))

    def forget_version(self) -> None:
        """It is gone, or its weights are in doubt: whatever comes back may have others."""
        self.facts = replace(self.facts, weight_version=None)

    def _more(self, facts: Facts) -> Facts:
        for call in self.dialect.more_facts_calls():
            with contextlib.suppress(RolloutError):
                facts = merged(facts, self.dialect.read_facts(self.call(call)))
        return facts

    def heard_version(self, version: str | None) -> None:
        """Note the weight version that an answer named."""
        if version is not None and version != self.facts.weight_version:
            self.facts = replace(self.facts, weight_version=version)

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
        headers = self._header_sets.get((call.admin, call.body is None, call.headers))
        return headers or self._make_headers(call)

    def _make_headers(self, call: Call) -> dict[str, str]:
        headers = {"User-Agent": _USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity", **dict(call.headers)}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        key = (self._config.admin_api_key if call.admin else None) or self._config.api_key
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self._header_sets.setdefault((call.admin, call.body is None, call.headers), headers)

    def _check_status(self, call: Call, reply: Reply, rid: str | None) -> None:
        status = reply.status
        if 200 <= status < 300:
            return
        words = error_text(reply.body)
        moved = f" (to {reply.headers.get('Location')!r}; redirects are not followed)" if 300 <= status < 400 else ""
        kind = UnsupportedError if status in {404, 405} else EngineHTTPError
        hint = self.dialect.hint(call, status, words)
        if kind is UnsupportedError and self.known and not self._sure:
            hint = _UNSURE
        raise kind(
            f"{call.method} {call.path} answered {status}{moved}: {words}" + (f"; {hint}" if hint else ""),
            engine=self.url,
            rid=rid,
            status=status,
            retry_after=reply.headers.get("Retry-After"),
            paused=self.dialect.says_paused(status, reply.body),
        )

    def _json(self, call: Call, reply: Reply, large: tuple[LargeField, ...]) -> Any:
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
