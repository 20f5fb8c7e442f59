"""The fleet: which engines are live, how much is in flight at each, the gate, the leases. Holds the shared state."""

from __future__ import annotations

import logging
import threading
from enum import Enum
from typing import TYPE_CHECKING

from rolloutsync.clock import ActiveTime, Deadline
from rolloutsync.errors import EngineUnavailableError, RolloutError, clip
from rolloutsync.gate import Gate, GateMode
from rolloutsync.slot import EngineState, EngineStatus, Lease, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine
    from rolloutsync.order import Order

log = logging.getLogger("rolloutsync.fleet")
_CROWD = 4096
_WOKEN = 4  # of those who wait for room, at each release: more than one, since not everybody may use that room
_HEAL_S = 1.0  # and should none of them be able to, the others look by themselves after this long


class Turned(Enum):
    """Why an order was turned away instead of getting a lease."""

    ABORTED = "aborted"
    CLOSED = "client closed"
    UNAVAILABLE = "no live engine"
    DEADLINE = "deadline"


class Fleet:
    """All engines of one client. Thread-safe.

    Args:
        clock: Time.
        active: Time that stands still while the gate is held; sample deadlines run on it.
        engine_wait_s: How long an order waits while no engine at all is live.
        concurrency: The user's limit for each engine, or None for the engine's own.
        on_trouble: Called, without any lock, after an engine stopped being live.
    """

    def __init__(
        self,
        clock: Clock,
        active: ActiveTime,
        *,
        engine_wait_s: float,
        concurrency: int | None,
        on_trouble: Callable[[], None],
    ) -> None:
        self._clock = clock
        self.active = active
        self._engine_wait_s = engine_wait_s
        self._concurrency = concurrency
        self._on_trouble = on_trouble
        # _changed's lock guards: _slots and everything in them, groups' homes, _gate, _closed, _crowded, _dead_since,
        # _drains.
        # Never held across I/O, callbacks or sleep. Two conditions on one lock: _room wakes those who wait for a lease.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._slots: dict[str, Slot] = {}
        self._gate = Gate(active)
        self._closed = False
        self._crowded = False
        self._dead_since: float | None = None  # active time; None while an engine is live or nobody has looked
        self._drains = 0  # threads in await_none, to be told of each release

    # --- membership ---

    def add(self, engine: Engine) -> bool:
        """Make an engine a member; False if it is one already."""
        with self._changed:
            slot = self._slots.get(engine.url)
            if slot is not None and slot.state is not EngineState.LEAVING:
                return False
            if slot is not None:
                slot.state = EngineState.LIVE  # it came back before its last request had ended
            else:
                self._slots[engine.url] = Slot(engine, self._concurrency)
            self._wake_locked()
            return True

    def remove(self, url: str) -> bool:
        """No new request goes there; those in flight finish. False if it is not a member."""
        with self._changed:
            slot = self._slots.get(url)
            if slot is not None and slot.leases:
                slot.state, slot.reason = EngineState.LEAVING, "removed, its last requests are ending"
            elif slot is not None:
                del self._slots[url]
            self._wake_locked()
        return slot is not None

    def engines(self, *states: EngineState) -> list[Engine]:
        """All members, or those in one of ``states``."""
        with self._changed:
            return [slot.engine for slot in self._slots.values() if not states or slot.state in states]

    def statuses(self) -> list[EngineStatus]:
        """A picture of all members at one moment."""
        with self._changed:
            return [slot.status() for slot in self._slots.values()]

    def totals(self) -> dict[str, tuple[int, int, int]]:
        """(requests, retries, tokens) by engine, at one moment."""
        with self._changed:
            return {url: (slot.requests, slot.retries, slot.tokens) for url, slot in self._slots.items()}

    def capacity(self) -> int:
        """Requests that may be in flight at once, over all members."""
        with self._changed:
            total = sum(slot.room for slot in self._slots.values())
            warn = total > _CROWD and not self._crowded
            self._crowded |= warn
        if warn:
            advice = "each is a thread and a socket: check RLIMIT_NOFILE, or set engine_concurrency"
            log.warning("%d requests may be in flight at once over %d engines; %s", total, len(self._slots), advice)
        return total

    # --- state of an engine ---

    def set_state(self, url: str, state: EngineState, reason: str = "") -> None:
        """Change an engine's state; logs once for each change and wakes whoever waits for an engine."""
        with self._changed:
            slot = self._slots.get(url)
            if slot is None or slot.state in {state, EngineState.LEAVING}:
                return
            if state is EngineState.LIVE:
                self._dead_since = None
            before, slot.state, slot.reason = slot.state, state, clip(reason, 300)
            self._wake_locked()
        if state is EngineState.LIVE:
            log.log(logging.DEBUG if before is EngineState.NEW else logging.INFO, "engine %s is live", url)
            return
        log.warning("engine %s is %s: %s", url, state, clip(reason, 300))
        self._on_trouble()

    def set_paused(self, url: str, paused: bool) -> None:
        """Note that we paused, or continued, an engine."""
        with self._changed:
            if url in self._slots:
                self._slots[url].paused = paused

    def set_proven(self, url: str, proven: bool) -> None:
        """Note that an engine was proven idle with the gate closed, or that this no longer holds."""
        with self._changed:
            if url in self._slots:
                self._slots[url].proven_idle = proven

    def is_paused(self, url: str) -> bool:
        """Whether we hold it paused."""
        with self._changed:
            return url in self._slots and self._slots[url].paused

    def unproven(self) -> list[str]:
        """Members that are not, at this moment, proven idle behind a closed gate."""
        with self._changed:
            return [url for url, slot in self._slots.items() if not slot.proven_idle]

    # --- the gate ---

    def close_gate(self, token: object, mode: GateMode) -> None:
        """No new request leaves from now on; ``token`` opens it again."""
        with self._changed:
            self._gate.close(token, mode)
            self._wake_locked()

    def open_gate(self, *tokens: object) -> None:
        """Take back what ``tokens`` closed. Proofs of idle end when it opens."""
        with self._changed:
            for token in tokens:
                self._gate.open(token)
            if self._gate.mode is GateMode.OPEN:
                for slot in self._slots.values():
                    slot.proven_idle = False
            self._wake_locked()

    @property
    def gate(self) -> GateMode:
        """Whether requests may leave."""
        with self._changed:
            return self._gate.mode

    def calls_off(self, order: Order) -> bool:
        """Whether ``order`` should end ABORTED rather than be tried again."""
        with self._changed:
            return self._closed or order.stopped or self._gate.mode is GateMode.ABORT

    # --- leases ---

    def lease(self, order: Order, rid: str, deadline: Deadline, *, avoid: str | None = None) -> Lease | Turned:
        """Block until a live engine has room, and count the request there.

        Prefers another engine than ``avoid``. Ends early when the order is called off, at ``deadline``, when the
        client closes, and after ``engine_wait_s`` without any live engine.
        """
        with self._changed:
            while True:
                patience: Deadline | None = None
                if (turned := self._turned_locked(order, deadline)) is not None:
                    return turned
                if self._gate.mode is GateMode.OPEN:
                    if (slot := self._choose_locked(order, avoid)) is not None:
                        return self._take_locked(slot, order, rid)
                    patience = self._patience_locked(order)
                    if patience is not None and patience.expired:
                        return Turned.UNAVAILABLE
                self._clock.wait(self._room, min(_HEAL_S, _sooner(deadline, patience) or _HEAL_S))

    def release(self, lease: Lease, *, tokens: int = 0, version: str | None = None, retry: bool = False) -> None:
        """The request has ended for good; says what it brought."""
        with self._changed:
            slot = lease.slot
            slot.give_back(lease)
            slot.tokens += tokens
            slot.retries += retry
            slot.weight_version = version or slot.weight_version
            if slot.state is EngineState.LEAVING and not slot.leases:
                self._slots.pop(slot.engine.url, None)
            self._room.notify(_WOKEN)
            if self._drains:
                self._changed.notify_all()

    def rest(self, order: Order, seconds: float, deadline: Deadline) -> None:
        """Wait ``seconds`` before another attempt; ends early when the order is called off or the client closes."""
        until = Deadline.after(self._clock, seconds)
        with self._changed:
            while not until.expired and self._turned_locked(order, deadline) is None:
                self._clock.wait(self._changed, _sooner(deadline, until))

    def nap(self, seconds: float) -> None:
        """Block for ``seconds``, less when the client closes."""
        until = Deadline.after(self._clock, seconds)
        with self._changed:
            while not self._closed and not until.expired:
                self._clock.wait(self._changed, until.remaining())

    def leases(self, url: str | None = None, *, of: Callable[[Order], bool] | None = None) -> list[Lease]:
        """Requests in flight now: at one engine or all, of all orders or some."""
        with self._changed:
            slots = list(self._slots.values()) if url is None else [s for s in (self._slots.get(url),) if s]
            return [lease for slot in slots for lease in slot.leases.values() if of is None or of(lease.order)]

    def rids(self, url: str) -> list[str]:
        """Ids of our requests in flight at one engine."""
        return [lease.rid for lease in self.leases(url)]

    def await_none(self, url: str, seconds: float, *, of: Callable[[Order], bool] | None = None) -> bool:
        """Block until no request of ours is in flight at an engine, for at most ``seconds``; whether that is so."""
        until = Deadline.after(self._clock, seconds)
        with self._changed:
            self._drains += 1
            try:
                while (left := self.leases(url, of=of)) and not until.expired:
                    self._clock.wait(self._changed, until.remaining())
            finally:
                self._drains -= 1
            return not left

    def await_known(self, grace_s: float, limit_s: float | None) -> None:
        """Block until each engine's first probe has ended.

        At most ``grace_s`` after the first live one, and ``limit_s`` in all.
        """
        until = Deadline.after(self._clock, limit_s)
        with self._changed:
            while not self._closed and not until.expired and EngineState.NEW in (states := self._states_locked()):
                if EngineState.LIVE in states:
                    until, grace_s = until.or_sooner(self._clock, grace_s), 86400.0
                self._clock.wait(self._changed, until.remaining())

    def wake(self) -> None:
        """Make everybody who waits look again: a stop was set."""
        with self._changed:
            self._wake_locked()

    def close(self) -> None:
        """Turn everybody away from now on."""
        with self._changed:
            self._closed = True
            self._wake_locked()

    def unavailable(self) -> EngineUnavailableError:
        """The error that names each engine and why it is not live."""
        with self._changed:
            known = [f"{url}: {slot.state}, {slot.reason or 'no answer yet'}" for url, slot in self._slots.items()]
        reasons = "; ".join(known) or "the client has no engines"
        return EngineUnavailableError(f"no live engine within {self._engine_wait_s:g} s: {reasons}")

    # --- under the lock ---

    def _states_locked(self) -> set[EngineState]:
        return {slot.state for slot in self._slots.values()}

    def _wake_locked(self) -> None:
        self._changed.notify_all()
        self._room.notify_all()

    def _turned_locked(self, order: Order, deadline: Deadline) -> Turned | None:
        if self._closed:
            return Turned.CLOSED
        if order.stopped or self._gate.mode is GateMode.ABORT:
            return Turned.ABORTED
        return Turned.DEADLINE if deadline.expired else None

    def _choose_locked(self, order: Order, avoid: str | None) -> Slot | None:
        """The live engine with the fewest in flight; the group's home while that is within n of the fewest."""
        live = [slot for slot in self._slots.values() if slot.state is EngineState.LIVE]
        free = [slot for slot in live if slot.has_room]
        free = [slot for slot in free if slot.engine.url != avoid] or free
        if not free:
            return None
        quietest = min(free, key=_in_flight)
        home = self._slots.get(order.group.home or "")
        if home in free and home is not None and home.in_flight - quietest.in_flight <= order.group.size:
            return home
        return quietest

    def _take_locked(self, slot: Slot, order: Order, rid: str) -> Lease:
        group, url = order.group, slot.engine.url
        home = self._slots.get(group.home or "")
        if home is None or home.state is not EngineState.LIVE:
            group.home, group.rank = url, slot.quietest_rank()
        rank = group.rank if group.home == url else slot.quietest_rank()
        if {"routed_dp_rank", "data_parallel_rank"} & order.prompt.fields.keys():
            rank = None  # the user chose one
        return slot.take(order, rid, rank, self._clock.monotonic())

    def _patience_locked(self, order: Order) -> Deadline | None:
        """When to give up: ``engine_wait_s`` after there was no live engine, or after the order came if that is later.

        One that is merely full is waited for until the sample's deadline. The time is the fleet's, so that orders which
        wait behind others do not begin it anew.
        """
        if EngineState.LIVE in self._states_locked():
            self._dead_since = None
            return None
        if self._dead_since is None:
            self._dead_since = self.active.monotonic()
        return Deadline(self.active, max(self._dead_since, order.admitted_active) + self._engine_wait_s)


def _in_flight(slot: Slot) -> int:
    return slot.in_flight


def _sooner(*deadlines: Deadline | None) -> float | None:
    left: Sequence[float | None] = [deadline.remaining() for deadline in deadlines if deadline is not None]
    told = [seconds for seconds in left if seconds is not None]
    return min(told) if told else None


def describe(error: RolloutError) -> str:
    """An error in one short line, for a state's reason."""
    return clip(error.message, 200)
