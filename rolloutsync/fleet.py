"""The fleet: which engines are live, how much is in flight at each, the gate, the leases. Holds the shared state."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from rolloutsync.clock import ActiveTime, Deadline, sooner
from rolloutsync.errors import clip
from rolloutsync.gate import Gate, GateMode, Turned
from rolloutsync.placement import call_all, call_next, choose, leave_line, line_up, none_live, take
from rolloutsync.slot import STALE, EngineState, EngineStatus, Lease, Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine
    from rolloutsync.errors import EngineUnavailableError
    from rolloutsync.order import Order

log = logging.getLogger("rolloutsync.fleet")
_CROWD = 4096
_WOKEN = 4  # of those who wait for room, at each release: more than one, since not everybody may use that room
_HEAL_S = 1.0  # and should none of them be able to, the others look by themselves after this long


class Fleet:
    """All engines of one client. Thread-safe.

    Args:
        clock: Time.
        active: Time that stands still while the gate is held; sample deadlines run on it.
        engine_wait_s: How long an order waits while no engine at all is live.
        concurrency: The user's limit for each engine, or None for the engine's own.
        on_trouble: Called, without any lock, after an engine stopped being live.
        on_busy: Called, without any lock, when an engine gets a request while it has no other of ours.
    """

    def __init__(
        self,
        clock: Clock,
        active: ActiveTime,
        *,
        engine_wait_s: float,
        concurrency: int | None,
        on_trouble: Callable[[], None],
        on_busy: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self.active = active
        self._engine_wait_s = engine_wait_s
        self._concurrency = concurrency
        self._on_trouble = on_trouble
        self._on_busy = on_busy
        # _changed's lock guards: all that follows, everything in the slots, groups' homes and samples' died_on.
        # Never held across I/O, callbacks or sleep. Two conditions on one lock: _room wakes those who wait for a lease;
        # those of sticky groups wait in the line of their home, each on a condition of its own, on this lock too.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._slots: dict[str, Slot] = {}
        self._gate = Gate(active)
        self._closed = False
        self._crowded = False
        self._dead_since: float | None = None  # active time; None while an engine is live or nobody has looked
        self._drains = 0  # threads in await_none, to be told of each release
        self.cuts = 0  # engine-wide aborts so far; only grows
        self.closings = 0  # closings of the gate that ended what waited; only grows
        self.expected_version: str | None = None  # of the weights; None: any engine may join
        self.expected_since = 0.0  # clock seconds

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
            self._wake_locked()
            if slot is not None and not slot.leases:
                del self._slots[url]
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
                slot.orphans.clear()
            before, slot.state, slot.reason = slot.state, state, clip(reason, 300)
            self._wake_locked()
        if state is EngineState.LIVE:
            log.log(logging.DEBUG if before is EngineState.NEW else logging.INFO, "engine %s is live", url)
            return
        log.warning("engine %s is %s: %s", url, state, clip(reason, 300))
        self._on_trouble()

    def explain(self, url: str, reason: str) -> None:
        """Say anew why an engine is in the state that it is in; logs that once."""
        with self._changed:
            slot = self._slots.get(url)
            if slot is None or slot.reason.startswith(STALE) or slot.reason == reason:
                return
            slot.reason = reason
            state = slot.state
        log.warning("engine %s is still %s: %s", url, state, reason)

    def waiting(self, url: str) -> tuple[float | None, float | None]:
        """Clock seconds since which the oldest of our requests waits at an engine, and of its last answer to one."""
        with self._changed:
            slots = self._some_locked(url)
            since = min((lease.since for slot in slots for lease in slot.leases.values()), default=None)
            return since, slots[0].answered_at if slots else None

    def set_paused(self, url: str, paused: bool) -> None:
        """Note that we paused, or continued, an engine."""
        with self._changed:
            if url in self._slots:
                self._slots[url].paused = paused

    def set_proven(self, url: str, proven: bool) -> None:
        """Note that an engine was proven idle with the gate closed, or that this no longer holds."""
        with self._changed:
            for slot in self._some_locked(url):
                slot.proven_idle = proven
                slot.orphans = {} if proven else slot.orphans

    def is_paused(self, url: str) -> bool:
        """Whether we hold it paused."""
        with self._changed:
            return url in self._slots and self._slots[url].paused

    def unproven(self) -> list[str]:
        """Members not proven idle, at this moment, behind a closed gate."""
        with self._changed:
            return [url for url, slot in self._slots.items() if not slot.proven_idle]

    # --- what may be left behind, and what it may do ---

    def note_orphan(self, url: str, rid: str) -> None:
        """A request may run on at an engine though nobody waits for it, until that is proven idle or gone."""
        with self._changed:
            for slot in self._some_locked(url):
                slot.orphans.setdefault(rid, self._clock.monotonic())

    def orphans(self, url: str | None = None) -> list[tuple[str, str, float]]:
        """(engine, rid, clock seconds since) of each such request, at one engine or all."""
        with self._changed:
            slots = self._some_locked(url)
            return [(slot.engine.url, rid, since) for slot in slots for rid, since in slot.orphans.items()]

    def convicts(self, lease: Lease, at: float) -> bool:
        """The engine died, at clock time ``at``, with this request on it; whether the sample is to blame.

        It is if it was the only suspect there. If not it becomes a suspect: from now on it runs where no other does.
        Each request reports its own end, so that a death counts once for each sample.
        """
        with self._changed:
            guilty = lease.slot.suspect is lease and lease.slot.watches_suspect(at)
            lease.order.life.died_on += (lease.engine.url,)
        return guilty

    def first_time(self, url: str, what: str) -> bool:
        """Whether ``what`` is to be logged of an engine: once."""
        with self._changed:
            slot = self._slots.get(url)
            new = slot is not None and what not in slot.told
            if slot is not None:
                slot.told.add(what)
        return new

    # --- the gate ---

    def close_gate(self, token: object, mode: GateMode, *, cuts: bool = False) -> None:
        """No new request leaves from now on; ``token`` opens it again. ``cuts``: it is an engine-wide abort too."""
        with self._changed:
            self._gate.close(token, mode)
            self.cuts += cuts or mode is GateMode.ABORT
            self.closings += mode is GateMode.ABORT
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
            return self._closed or self._is_off_locked(order)

    # --- leases ---

    def lease(self, order: Order, rid: str, deadline: Deadline, *, avoid: str | None = None) -> Lease | Turned:
        """Block until a live engine has room, and count the request there.

        Prefers another engine than ``avoid``. Ends early when the order is called off, at ``deadline``, when the
        client closes, and after ``engine_wait_s`` without any live engine.
        """
        with self._changed:
            place = self._place_locked(order, rid, deadline, avoid)
            leave_line(self._slots, order)
        if isinstance(place, Lease) and place.first:
            self._on_busy(place.engine)
        return place

    def _place_locked(self, order: Order, rid: str, deadline: Deadline, avoid: str | None) -> Lease | Turned:
        while True:
            patience: Deadline | None = None
            if (turned := self._turned_locked(order, deadline)) is not None:
                return turned
            if self._gate.mode is GateMode.OPEN:
                now = self._clock.monotonic()
                if (slot := choose(self._slots, order, avoid, now)) is not None:
                    return take(self._slots, slot, order, rid, now)
                patience = self._patience_locked(order)
                if patience is not None and patience.expired:
                    return Turned.UNAVAILABLE
            queue = line_up(self._slots, order, self._lock) or self._room
            self._clock.wait(queue, min(_HEAL_S, sooner(deadline, patience) or _HEAL_S))

    def release(
        self, lease: Lease, *, answered: bool = False, tokens: int = 0, version: str | None = None, retry: bool = False
    ) -> None:
        """The request has ended for good; says what it brought."""
        with self._changed:
            slot = lease.slot
            slot.give_back(lease)
            slot.answered_at = self._clock.monotonic() if answered else slot.answered_at
            slot.tokens += tokens
            slot.retries += retry
            slot.engine.heard_version(version)
            if slot.state is EngineState.LEAVING and not slot.leases:
                self._slots.pop(slot.engine.url, None)
            call_next(slot)
            self._room.notify(len(self._slots) + _WOKEN if lease.order.life.died_on else _WOKEN)
            if self._drains:
                self._changed.notify_all()
            expected = self.expected_version
        if None not in {version, expected} and version != expected and lease.since > self.expected_since:
            words = f"{STALE}: it answered with weights {version!r}, the fleet has {expected!r}"
            self.set_state(lease.engine.url, EngineState.QUARANTINED, words)

    def rest(self, order: Order, seconds: float, deadline: Deadline) -> None:
        """Wait ``seconds`` before another attempt; ends early when the order is called off or the client closes."""
        until = Deadline.after(self._clock, seconds)
        with self._changed:
            while not until.expired and self._turned_locked(order, deadline) is None:
                self._clock.wait(self._changed, sooner(deadline, until))

    def nap(self, seconds: float) -> None:
        """Block for ``seconds``, less when the client closes."""
        until = Deadline.after(self._clock, seconds)
        with self._changed:
            while not (self._closed or until.expired):
                self._clock.wait(self._changed, until.remaining())

    def leases(self, url: str | None = None, *, of: Callable[[Order], bool] | None = None) -> list[Lease]:
        """Requests in flight now: at one engine or all, of all orders or some."""
        with self._changed:
            leases = [lease for slot in self._some_locked(url) for lease in slot.leases.values()]
            return [lease for lease in leases if of is None or of(lease.order)]

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
        return none_live(dict(self._slots), self._engine_wait_s)

    # --- under the lock ---

    def _some_locked(self, url: str | None) -> list[Slot]:
        return [slot for name, slot in self._slots.items() if url in {None, name}]

    def _states_locked(self) -> set[EngineState]:
        return {slot.state for slot in self._slots.values()}

    def _wake_locked(self) -> None:
        call_all(self._slots)
        self._changed.notify_all()
        self._room.notify_all()

    def _is_off_locked(self, order: Order) -> bool:
        """Also by a drain that is over: it may have taken no longer than it takes to wake up."""
        return order.stopped or self._gate.mode is GateMode.ABORT or order.closings != self.closings

    def _turned_locked(self, order: Order, deadline: Deadline) -> Turned | None:
        if self._closed:
            return Turned.CLOSED
        if self._is_off_locked(order):
            return Turned.ABORTED
        return Turned.DEADLINE if deadline.expired else None

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
