"""A slot: what the fleet keeps of one engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    import threading

    from rolloutsync.engine import Engine
    from rolloutsync.order import Group, Order

DEFAULT_LIMIT = 256
LARGEST_LIMIT = 512
STALE = "stale"  # how the reason begins of an engine with other weights than the fleet's
ALL_BACK_S = 300.0  # where many suspects wait, each is watched for less, so that all of them run after this long
LEAST_WATCHED_S = 1.0
WATCHED_S = 30.0  # for so long a suspect is the only one on its engine; a second time: until it has ended


class EngineState(str, Enum):
    """Whether an engine gets requests."""

    NEW = "new"  # not asked yet what it is
    LIVE = "live"
    DOWN = "down"  # unreachable; probed until it answers
    QUARANTINED = "quarantined"  # may still run something of ours; readmitted only when proven idle
    LEAVING = "leaving"  # removed; a member until its last request has ended

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as the client sees it.

    Attributes:
        url: Its base URL.
        state: See ``EngineState``.
        reason: Why it is in that state; empty for a live one.
        in_flight: Requests of this client there.
        limit: The most that this client sends at once.
        paused: This client has paused it.
        dialect: "sglang" or "vllm"; "unknown" before it was asked.
        version: Of the engine's software; None where it did not say. The same holds for what follows.
        weight_version: As of the last answer that named one.
        model_path: As the engine names it.
        dp_size: Data-parallel ranks.
    """

    url: str
    state: EngineState
    reason: str
    in_flight: int
    limit: int
    paused: bool
    dialect: str
    version: str | None
    weight_version: str | None
    model_path: str | None
    dp_size: int | None


@dataclass(eq=False, slots=True)
class Lease:
    """The right to have one request at one engine.

    Attributes:
        rid: Of that request.
        dp_rank: To be sent along, or None to let the engine choose.
        since: Clock seconds.
        first: No other of ours was there when it was taken.
    """

    slot: Slot
    order: Order
    rid: str
    dp_rank: int | None
    since: float
    first: bool = False
    suspect: bool = False  # its sample was one when it was taken
    alone: bool = True  # no other suspect was there while it was

    @property
    def engine(self) -> Engine:
        """Where the request goes."""
        return self.slot.engine


@dataclass(eq=False, slots=True)
class Slot:
    """Mutable; guarded by the fleet's lock."""

    engine: Engine
    limit: int | None
    state: EngineState = EngineState.NEW
    reason: str = ""
    before: tuple[EngineState, str] = (EngineState.NEW, "")  # state and reason before it was LEAVING
    leases: dict[int, Lease] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)  # our requests in flight by DP rank
    paused: bool = False
    proven_idle: bool = False
    answered_at: float | None = None  # clock seconds of the last whole answer to a request of ours
    homes: WeakSet[Group] = field(default_factory=WeakSet)  # sticky groups that live here
    line: dict[Order, threading.Condition] = field(default_factory=dict)  # of theirs that wait for room, oldest first
    debt: bool = False  # the last place went to somebody who is at home nowhere: the next is the line's
    suspect: Lease | None = None  # the last lease of a sample that was there when an engine died
    orphans: dict[str, float] = field(default_factory=dict)  # rid to clock seconds: its abort was not delivered
    told: set[str] = field(default_factory=set)  # what was logged once and is not to be logged again
    sharers: int = 1  # clients that use the engine side by side, this one included
    requests: int = 0
    retries: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        """Our requests there."""
        return len(self.leases)

    @property
    def room(self) -> int:
        """The most that we send at once: our share of what the engine takes."""
        limit, told = self.limit, self.engine.facts.running_limit
        if limit is None:
            limit = DEFAULT_LIMIT if told is None else min(LARGEST_LIMIT, told * 5 // 4)
        return max(1, limit // self.sharers)

    @property
    def is_live(self) -> bool:
        """Whether it gets requests at all."""
        return self.state is EngineState.LIVE

    @property
    def has_room(self) -> bool:
        """Whether one more request may go there."""
        return self.is_live and len(self.leases) < self.room

    def has_room_for(self, order: Order) -> bool:
        """Whether a request that is at home here may go there: whoever waited before it goes first."""
        before = list(self.line).index(order) if order in self.line else len(self.line)
        return self.is_live and len(self.leases) + before < self.room

    def watches_suspect(self, now: float, waiting: int = 0) -> bool:
        """Whether a suspect is there that must be the only one."""
        lease = self.suspect
        if lease is None or id(lease) not in self.leases:
            return False
        watched_s = max(LEAST_WATCHED_S, min(WATCHED_S, ALL_BACK_S / max(1, waiting)))
        return len(lease.order.life.died_on) > 1 or now - lease.since < watched_s

    def quietest_rank(self) -> int | None:
        """The DP rank with the fewest of our requests; None for an engine with a single rank."""
        size = self.engine.facts.dp_size or 1
        return min(range(size), key=lambda rank: self.ranks.get(rank, 0)) if size > 1 else None

    def home_rank(self) -> int | None:
        """The DP rank with the fewest homes; None for an engine with a single rank."""
        size, homes = self.engine.facts.dp_size or 1, Counter(group.rank for group in self.homes)
        return min(range(size), key=lambda rank: (homes[rank], self.ranks.get(rank, 0))) if size > 1 else None

    def take(self, order: Order, rid: str, dp_rank: int | None, now: float) -> Lease:
        """Count one more request."""
        lease = Lease(self, order, rid, dp_rank, now, first=not self.leases)
        self.leases[id(lease)] = lease
        self.requests += 1
        self.debt = not order.group.sticky
        if order.life.died_on:
            others = [other for other in self.leases.values() if other is not lease and other.suspect]
            for one in (lease, *others) if others else ():
                one.alone = False
            self.suspect, lease.suspect = lease, True
        if dp_rank is not None:
            self.ranks[dp_rank] = self.ranks.get(dp_rank, 0) + 1
        return lease

    def give_back(self, lease: Lease) -> None:
        """Count one request less."""
        if self.leases.pop(id(lease), None) is not None and lease.dp_rank is not None:
            self.ranks[lease.dp_rank] -= 1
        if self.suspect is lease:
            self.suspect = None

    def status(self) -> EngineStatus:
        """A frozen picture."""
        facts = self.engine.facts
        return EngineStatus(
            url=self.engine.url,
            state=self.state,
            reason=self.reason,
            in_flight=self.in_flight,
            limit=self.room,
            paused=self.paused,
            dialect=self.engine.dialect.name if self.engine.known else "unknown",
            version=facts.version,
            weight_version=facts.weight_version,
            model_path=facts.model_path,
            dp_size=facts.dp_size,
        )
