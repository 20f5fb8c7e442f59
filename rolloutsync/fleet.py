"""The fleet: which engines are live, how much is in flight at each, the gate, the leases. Holds the shared state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolloutsync.clock import ActiveTime, Deadline, sooner
from rolloutsync.gate import Gate, GateMode, Turned
from rolloutsync.placement import call_next, choose, leave_line, line_up, none_live, take
from rolloutsync.roster import Roster
from rolloutsync.slot import STALE, EngineState, Lease

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine
    from rolloutsync.errors import Cut, EngineUnavailableError
    from rolloutsync.order import Order

_WOKEN = 4  # of those who wait for room, at each release: more than one, since not everybody may use that room
_HEAL_SUSPECT_S = 0.25  # nobody tells it that another suspect is watched no more
_HEAL_S = 1.0  # and should none of them be able to, the others look by themselves after this long


class Fleet(Roster):
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
        super().__init__(clock, concurrency=concurrency, on_trouble=on_trouble)
        self.active = active
        self._engine_wait_s = engine_wait_s
        self._on_busy = on_busy
        self._gate = Gate(active)
        self._suspects = 0  # that wait for a lease
        self._most_suspects = 0  # since none did
        self._wanting = 0  # threads that wait for room
        self._drains = 0  # threads in await_none, to be told of each release
        self.cuts = 0  # engine-wide aborts so far; only grows
        self.closings = 0  # closings of the gate that ended what waited; only grows

    # --- the gate ---

    def close_gate(self, token: object, mode: GateMode, *, cuts: bool = False) -> None:
        """No new request leaves from now on; ``token`` opens it again. ``cuts``: it is an engine-wide abort too."""
        with self._lock:
            self._gate.close(token, mode)
            self.cuts += cuts or mode is GateMode.ABORT
            self.closings += mode is GateMode.ABORT
            self._wake_locked()

    def open_gate(self, *tokens: object) -> None:
        """Take back what ``tokens`` closed. Proofs of idle end when it opens."""
        with self._lock:
            for token in tokens:
                self._gate.open(token)
            if self._gate.mode is GateMode.OPEN:
                for slot in self._slots.values():
                    slot.proven_idle = False
            self._wake_locked()

    @property
    def gate(self) -> GateMode:
        """Whether requests may leave."""
        with self._lock:
            return self._gate.mode

    def calls_off(self, order: Order) -> bool:
        """Whether ``order`` should end ABORTED rather than be tried again."""
        with self._lock:
            return self._closed or self._is_off_locked(order)

    # --- leases ---

    def lease(
        self,
        order: Order,
        rid: str,
        deadline: Deadline,
        *,
        avoid: str | None = None,
        gives_way: Callable[[], bool] = lambda: False,
    ) -> Lease | Turned:
        """Block until a live engine has room, and count the request there.

        Prefers another engine than ``avoid``. Ends early when the order is called off, at ``deadline``, when the
        client closes, after ``engine_wait_s`` without any live engine, and within a second of ``gives_way()``.
        """
        with self._lock:
            suspect = bool(order.life.died_on)
            place = self._place_suspect_locked if suspect else self._place_locked
            found = place(order, rid, deadline, avoid, gives_way)
            if order.group.sticky:
                leave_line(self._slots, order)
        if isinstance(found, Lease) and found.first:
            self._on_busy(found.engine)
        return found

    def lease_now(self, order: Order, rid: str, deadline: Deadline) -> Lease | None:
        """The lease that ``lease`` would give at once; None where it would wait, or turn the order away."""
        with self._lock:
            waits = self._wanting or order.group.sticky or order.life.died_on or self._gate.mode is not GateMode.OPEN
            if waits or self._turned_locked(order, deadline) is not None:
                return None
            now = self._clock.monotonic()
            slot = choose(self._slots, order, None, now)
            if slot is None:
                return None
            found = take(self._slots, slot, order, rid, now)
        if found.first:
            self._on_busy(found.engine)
        return found

    def _place_suspect_locked(
        self, order: Order, rid: str, deadline: Deadline, avoid: str | None, gives_way: Callable[[], bool]
    ) -> Lease | Turned:
        self._suspects += 1
        self._most_suspects = max(self._most_suspects, self._suspects)
        try:
            return self._place_locked(order, rid, deadline, avoid, gives_way)
        finally:
            self._suspects -= 1
            self._most_suspects = self._most_suspects if self._suspects else 0

    def _place_locked(
        self, order: Order, rid: str, deadline: Deadline, avoid: str | None, gives_way: Callable[[], bool]
    ) -> Lease | Turned:
        while True:
            patience: Deadline | None = None
            if (turned := self._turned_locked(order, deadline)) is not None:
                return turned
            if self._gate.mode is GateMode.OPEN:
                now = self._clock.monotonic()
                if (slot := choose(self._slots, order, avoid, now, self._most_suspects)) is not None:
                    return take(self._slots, slot, order, rid, now)
                patience = self._patience_locked(order)
                if patience is not None and patience.expired:
                    return Turned.UNAVAILABLE
            if gives_way():
                return Turned.ASIDE
            queue = line_up(self._slots, order, self._lock) or self._room
            heal_s = _HEAL_SUSPECT_S if order.life.died_on else _HEAL_S
            self._wanting += 1
            try:
                self._clock.wait(queue, min(heal_s, sooner(deadline, patience) or heal_s))
            finally:
                self._wanting -= 1

    def release(
        self, lease: Lease, *, answered: bool = False, tokens: int = 0, version: str | None = None, retry: bool = False
    ) -> None:
        """The request has ended for good; says what it brought."""
        with self._lock:
            slot = lease.slot
            slot.give_back(lease)
            slot.answered_at = self._clock.monotonic() if answered else slot.answered_at
            slot.tokens += tokens
            slot.retries += retry
            slot.engine.heard_version(version)
            if slot.state is EngineState.LEAVING and not slot.leases:
                self._slots.pop(slot.engine.url, None)
            if self._wanting:
                call_next(slot)
                self._room.notify(len(self._slots) + _WOKEN if lease.order.life.died_on else _WOKEN)
            if self._drains:
                self._changed.notify_all()
            expected = self.expected_version
        if None not in {version, expected} and version != expected and lease.since > self.expected_since:
            words = f"{STALE}: it answered with weights {version!r}, the fleet has {expected!r}"
            self.set_state(lease.engine.url, EngineState.QUARANTINED, words)

    def give_back(self, lease: Lease) -> None:
        """Nothing was sent on it."""
        with self._lock:
            lease.slot.requests -= 1
        self.release(lease)

    def count(self, url: str, *, requests: int, tokens: int) -> None:
        """Requests that somebody else has made for us have ended, the last of them at this engine."""
        with self._lock:
            for slot in self._some_locked(url):
                slot.requests += requests
                slot.retries += max(0, requests - 1)
                slot.tokens += tokens

    def cut(self, engine: Engine, why: Cut) -> None:
        """Shut the sockets of our generates at an engine."""
        engine.cut(why)

    def rest(self, order: Order, seconds: float, deadline: Deadline) -> None:
        """Wait ``seconds`` before another attempt; ends early when the order is called off or the client closes."""
        until = Deadline.after(self._clock, seconds)
        with self._lock:
            while not until.expired and self._turned_locked(order, deadline) is None:
                self._clock.wait(self._changed, sooner(deadline, until))

    def nap(self, seconds: float) -> None:
        """Block for ``seconds``, less when the client closes."""
        until = Deadline.after(self._clock, seconds)
        with self._lock:
            while not (self._closed or until.expired):
                self._clock.wait(self._changed, until.remaining())

    def leases(self, url: str | None = None, *, of: Callable[[Order], bool] | None = None) -> list[Lease]:
        """Requests in flight now, of all orders or some: at all engines, or at one (and all that share its front)."""
        with self._lock:
            leases = [lease for slot in self._sharing_locked(url) for lease in slot.leases.values()]
            return [lease for lease in leases if of is None or of(lease.order)]

    def rids(self, url: str) -> list[str]:
        """Ids of our requests in flight at one engine."""
        return [lease.rid for lease in self.leases(url)]

    def await_none(self, url: str, seconds: float, *, of: Callable[[Order], bool] | None = None) -> bool:
        """Block until no request of ours is in flight at an engine, for at most ``seconds``; whether that is so."""
        until = Deadline.after(self._clock, seconds)
        with self._lock:
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
        with self._lock:
            while not self._closed and not until.expired and EngineState.NEW in (states := self._states_locked()):
                if EngineState.LIVE in states:
                    until, grace_s = until.or_sooner(self._clock, grace_s), 86400.0
                self._clock.wait(self._changed, until.remaining())

    def wake(self) -> None:
        """Make everybody who waits look again: a stop was set."""
        with self._lock:
            self._wake_locked()

    def close(self) -> None:
        """Turn everybody away from now on."""
        with self._lock:
            self._closed = True
            self._wake_locked()

    def unavailable(self) -> EngineUnavailableError:
        """The error that names each engine and why it is not live."""
        with self._lock:
            return none_live(self._slots, self._engine_wait_s)

    # --- under the lock ---

    def _is_off_locked(self, order: Order) -> bool:
        """Also by a drain that is over: it may have taken no longer than it takes to wake up."""
        return order.closings != self.closings or self._gate.mode is GateMode.ABORT or order.stopped

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
