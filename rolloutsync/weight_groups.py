"""Process groups in which a trainer (rank 0) broadcasts weights to engines."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.errors import EngineHTTPError, ProtocolError, RolloutError, WeightUpdateError
from rolloutsync.slot import EngineState
from rolloutsync.threads import start_thread
from rolloutsync.weight_member import Member, run_all, run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet

_DESTROY_S = 10.0


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group that engines are joining.

    Attributes:
        name: Of the group.
        world_size: Ranks in all: the trainer and every tensor-parallel rank of every engine.
        rank_offsets: The first rank of each engine, by URL; the trainer is rank 0.
        joined: Ends when every engine has joined, which they do once the trainer does; its error is a
            ``WeightUpdateError``.
    """

    name: str
    world_size: int
    rank_offsets: Mapping[str, int]
    joined: Future[None] = field(repr=False)

    def wait(self, timeout: float | None = None) -> None:
        """Block until every engine has joined, for at most ``timeout`` seconds; raises what went wrong."""
        self.joined.result(timeout)


class Groups:
    """The weight groups of one client. Thread-safe.

    Args:
        fleet: Whose engines.
        cut: Shuts the control calls to an engine.
        clock: Time.
        name: Of the client, for thread names.
    """

    def __init__(self, fleet: Fleet, cut: Callable[[str], object], clock: Clock, name: str) -> None:
        self._fleet = fleet
        self._cut = cut
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()  # guards: _groups, _destroyed. Never held across I/O.
        self._groups: dict[str, WeightGroup] = {}
        self._destroyed: set[str] = set()

    def check(self, name: str) -> None:
        """Raise WeightUpdateError for a group that this client has destroyed: engines that are asked would be stale."""
        with self._lock:
            gone = name in self._destroyed
        if gone:
            raise WeightUpdateError(f"the weight group {name!r} was destroyed: init_group() first")

    def urls(self, name: str) -> frozenset[str] | None:
        """The engines of a group; None if this client has not made it."""
        with self._lock:
            group = self._groups.get(name)
        return None if group is None else frozenset(group.rank_offsets)

    def init(self, address: str, port: int, name: str, backend: str) -> WeightGroup:
        """Tell every engine to join. Returns at once: an engine answers when all ranks are there, the caller's too."""
        members = [Member(e, set()) for e in self._fleet.engines(EngineState.LIVE, EngineState.QUARANTINED)]
        offsets, world_size = _place([member.engine for member in members])
        group = WeightGroup(name, world_size, offsets, Future())
        with self._lock:
            if not members:
                raise self._fleet.unavailable()
            _check_alike(members)
            if name in self._groups:
                raise WeightUpdateError(f"the weight group {name!r} exists: destroy_group({name!r}) first")
            self._groups[name] = group
            self._destroyed.discard(name)

        def join(member: Member) -> None:
            weights, offset = member.engine.dialect.weights, offsets[member.url]
            call = weights.init_group(address, port, offset, world_size, name, backend)
            member.attempt("init_group", lambda: member.ask(call))

        start_thread(f"{self._name}-group", lambda: self._join(group, members, join))
        return group

    def _join(self, group: WeightGroup, members: list[Member], join: Callable[[Member], None]) -> None:
        run_together(f"{self._name}-group", members, join, self._cut)
        failed = [member for member in members if not member.ok]
        if failed:
            self.destroy(group.name, quietly=True)
            words = "; ".join(f"{member.url}: {member.reason}" for member in failed)
            error = WeightUpdateError(f"the weight group {group.name!r} was not made: {words}", engine=failed[0].url)
            error.__cause__ = failed[0].error
            group.joined.set_exception(error)
        else:
            group.joined.set_result(None)

    def destroy(self, name: str, *, quietly: bool = False) -> None:
        """Make every engine leave a group. One that does not know it has left already.

        Raises:
            WeightUpdateError: Some engine did not answer, or refused; not with ``quietly``.
        """
        with self._lock:
            group = self._groups.pop(name, None)
            self._destroyed.add(name)
        known = None if group is None else set(group.rank_offsets)
        there = self._fleet.engines(EngineState.LIVE, EngineState.QUARANTINED)
        members = [Member(engine, set()) for engine in there if known is None or engine.url in known]
        run_all(f"{self._name}-group", members, lambda member: self._leave(member, name))
        failed = {member.url: member.reason for member in members if not member.ok}
        if failed and not quietly:
            words = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
            raise WeightUpdateError(f"destroy_group({name!r}) failed: {words}", engine=next(iter(failed)))

    def _leave(self, member: Member, name: str) -> None:
        weights, deadline = member.engine.dialect.weights, Deadline.after(self._clock, _DESTROY_S)

        def act() -> None:
            try:
                member.ask(weights.destroy_group(name), deadline=deadline)
            except EngineHTTPError as error:
                if not weights.no_such_group(error.message):
                    raise

        member.attempt("destroy_group", act)


def _check_alike(members: Iterable[Member]) -> None:
    kinds = {member.engine.dialect.name: member.url for member in members}
    if len(kinds) > 1:
        words = ", ".join(f"{name} ({url})" for name, url in kinds.items())
        raise WeightUpdateError(f"engines of several kinds cannot be in one weight group: {words}; update from disk")


def _place(engines: Iterable[Engine]) -> tuple[dict[str, int], int]:
    """The first rank of each engine, and the number of ranks: the trainer is 0, engines follow in the fleet's order."""
    offsets: dict[str, int] = {}
    rank = 1
    for engine in engines:
        offsets[engine.url] = rank
        rank += tp_size(engine)
    return offsets, rank


def tp_size(engine: Engine) -> int:
    """How many ranks an engine has; it is asked again if that is not known.

    Raises:
        ProtocolError: It does not say.
    """
    size = engine.facts.tp_size
    if size is None:
        try:
            size = engine.learn().tp_size
        except RolloutError as error:
            raise ProtocolError(f"tp_size could not be read: {error.message}", engine=engine.url) from error
    if size is None:
        raise ProtocolError("the engine does not say its tp_size, which its ranks follow from", engine=engine.url)
    return size
