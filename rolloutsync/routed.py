"""Engines that only their router can make generate: some prefill, others decode. All else they are told directly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutsync.dialects.base import Call
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.engine import Engine
from rolloutsync.errors import EngineHTTPError, Phase, RolloutError, TransportError
from rolloutsync.order import new_rid
from rolloutsync.routers import Role, check_kept
from rolloutsync.threads import fan_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rolloutsync.clock import Clock, Deadline
    from rolloutsync.config import ClientConfig
    from rolloutsync.dialects.base import Facts
    from rolloutsync.engine import Flight
    from rolloutsync.errors import Cut
    from rolloutsync.fleet import Fleet
    from rolloutsync.order import Group
    from rolloutsync.routers import Worker
    from rolloutsync.sample import Prompt, Segment
    from rolloutsync.transport import Transport

KEY_HEADER = "X-SMG-Routing-Key"
_KEY = "\0routing key"  # no request field can be called so
_HEALTH = Call(method="GET", path="/health")


class _Keyed(SGLangDialect):
    """SGLang, behind a router that is told what belongs together."""

    def encode_generate(
        self, prompt: Prompt, rid: str, *, facts: Facts, dp_rank: int | None, route: str | None = None
    ) -> Call:
        """See ``Dialect.encode_generate``."""
        fields = dict(prompt.fields)
        key = fields.pop(_KEY)
        call = super().encode_generate(replace(prompt, fields=fields), rid, facts=facts, dp_rank=dp_rank, route=route)
        return replace(call, headers=(*call.headers, (KEY_HEADER, key)))


class Router(Engine):
    """A router, as far as it passes generates on. Thread-safe.

    Args:
        url: Its base URL.
        forwards_all: See ``Listing``.
    """

    def __init__(
        self, url: str, transport: Transport, config: ClientConfig, clock: Clock, *, forwards_all: bool
    ) -> None:
        super().__init__(url, transport, _Keyed(), config, clock)
        self._forwards_all = forwards_all
        self._name = new_rid()[:8]  # no other client's groups bear the same keys

    def pass_on(self, prompt: Prompt, rid: str, group: Group | None, *, deadline: Deadline, fresh: bool) -> Segment:
        """Generate somewhere; what belongs to one group or session bears one key.

        Raises:
            UnsupportedError: It has something that this router drops.
        """
        fields = prompt.fields
        check_kept(fields, prompt.sampling_params, router=self.url, forwards_all=self._forwards_all, rid=rid)
        session = fields.get("session_id")
        key = f"{self._name}-{rid if group is None else group.number}" if session is None else str(session)
        return self.generate(replace(prompt, fields={**fields, _KEY: key}), rid, deadline=deadline, fresh=fresh)

    def check_there(self) -> None:
        """Raise TransportError if nobody answers there."""
        try:
            self.call(_HEALTH)
        except EngineHTTPError:
            return

    def _headers(self, call: Call) -> dict[str, str]:
        return {**super()._headers(replace(call, headers=())), **dict(call.headers)}  # not kept: they are many


class RoutedEngine(Engine):
    """One worker of a disaggregated fleet. Thread-safe.

    Which workers a request goes to is the router's choice. So one that is meant for this engine may run at any of its
    peers: it is aborted at all of them, and its socket is the router's. ``load``, pauses, weights and the abort of
    everything concern this engine alone.

    Args:
        worker: What the router says of it.
        router: Passes its generates on.
        peers: All engines behind that router, itself too.
    """

    def __init__(
        self,
        worker: Worker,
        router: Router,
        peers: Callable[[], Iterable[Engine]],
        transport: Transport,
        config: ClientConfig,
        clock: Clock,
    ) -> None:
        super().__init__(worker.url, transport, SGLangDialect(), config, clock)
        self.front = router.url
        self.fixed_limit = 1 if worker.role is Role.PREFILL else None  # decoding is what limits how many run at once
        self.router = router
        self._peers = peers

    def generate(
        self,
        prompt: Prompt,
        rid: str,
        *,
        deadline: Deadline,
        dp_rank: int | None = None,  # noqa: ARG002 - the router chooses
        fresh: bool = False,
        group: Group | None = None,
        flight: Flight | None = None,  # noqa: ARG002 - never: see parks
    ) -> Segment:
        """Generate one sample's tokens, wherever the router sends it."""
        return self.router.pass_on(prompt, rid, group, deadline=deadline, fresh=fresh)

    def parks(self, *_: object, **__: object) -> bool:
        """Each request is waited for."""
        return False

    def abort(self, rid: str | None, *, deadline: Deadline | None = None) -> None:
        """Abort everything here, or one request wherever it runs. Peers that are gone run nothing."""
        if rid is None:
            super().abort(None, deadline=deadline)
            return
        calls = [_bind(peer, rid, deadline) for peer in self._peers()]
        failures = [outcome.get() for outcome in fan_out("rolloutsync-abort", calls)]
        errors = [failure for failure in failures if failure is not None]
        told = [error for error in errors if not _is_gone(error)]
        if told or len(errors) == len(failures):
            raise (told or errors)[0]

    def cut(self, reason: Cut, *, rid: str | None = None) -> int:
        """Shut the sockets of generates (of one rid, or all behind the router: nobody knows which of them are here)."""
        return self.router.cut(reason, rid=rid)

    def learn(self) -> Facts:
        """Ask what the engine is, and whether the router is there, without which it is of no use."""
        facts = super().learn()
        self.router.check_there()
        self.router.facts = facts
        return facts


def _bind(engine: Engine, rid: str, deadline: Deadline | None) -> Callable[[], RolloutError | None]:
    def abort() -> RolloutError | None:
        try:
            Engine.abort(engine, rid, deadline=deadline)  # there alone
        except RolloutError as error:
            return error
        return None

    return abort


def _is_gone(error: RolloutError) -> bool:
    return isinstance(error, TransportError) and error.phase is Phase.REFUSED


def peers_of(front: str, fleet: Fleet) -> Callable[[], list[Engine]]:
    """All engines behind one router, at the moment of the call."""
    return lambda: [engine for engine in fleet.engines() if engine.front == front]
