"""The roster: who is a member of the fleet, in what state, and what may be left behind there."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from rolloutsync.errors import clip
from rolloutsync.placement import call_all
from rolloutsync.slot import STALE, EngineState, EngineStatus, Lease, Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine

log = logging.getLogger("rolloutsync.fleet")
_CROWD = 4096


class Roster:
    """The members of a fleet. Thread-safe. See ``Fleet`` for the arguments.

    Attributes:
        sharers: Clients that use the engines side by side, this one included; set before any engine is added.
    """

    sharers = 1

    def __init__(self, clock: Clock, *, concurrency: int | None, on_trouble: Callable[[], None]) -> None:
        self._clock = clock
        self._concurrency = concurrency
        self._on_trouble = on_trouble
        # _changed's lock guards all that follows, all in the slots, groups' homes, samples' died_on, and what the fleet
        # adds. Never held across I/O, callbacks or sleep. Two conditions on one lock: _room wakes those who wait
        # for a lease; those of sticky groups wait in the line of their home, each on a condition of its own, on it too.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._slots: dict[str, Slot] = {}
        self._closed = False
        self._crowded = False
        self._dead_since: float | None = None  # active time; None while an engine is live or nobody has looked
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
                slot.state, slot.reason = self._returned_locked(slot)  # before its last request had ended
            else:
                self._slots[engine.url] = Slot(engine, engine.fixed_limit or self._concurrency, sharers=self.sharers)
            self._wake_locked()
        if slot is not None:
            self._on_trouble()
        return True

    def remove(self, url: str, *, busy: bool = False) -> bool:
        """No new request goes there; those in flight (``busy``: somebody else's too) finish. False if no member."""
        with self._changed:
            slot = self._slots.get(url)
            stays = slot is not None and bool(busy or slot.leases)
            if slot is not None and stays and slot.state is not EngineState.LEAVING:
                slot.before = slot.state, slot.reason
                slot.state, slot.reason = EngineState.LEAVING, "removed, its last requests are ending"
            self._wake_locked()
            if slot is not None and not stays:
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
            advice = "each is a socket, and may need a thread: check RLIMIT_NOFILE, or set engine_concurrency"
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
        if reason.startswith(STALE):
            self._spread(url, state)
        self._on_trouble()

    def _spread(self, url: str, state: EngineState) -> None:
        """Nobody can keep a router from sending to a stale engine: it takes all others behind that router with it."""
        with self._changed:
            others = [slot.engine.url for slot in self._sharing_locked(url) if slot.is_live]
        for other in others:
            self.set_state(
                other, state, f"{STALE}: {url}, which is behind the same router, has not the fleet's weights"
            )

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
                self._slots[url].engine.owed = ()  # whoever paused it on purpose ends that, or has just ended it

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
            guilty = lease.slot.suspect is lease and lease.alone and lease.slot.watches_suspect(at)
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

    def staleness(self, engine: Engine) -> str:
        """Why an engine may not join: it, or one behind the same router, serves other weights. Empty if it may."""
        expected, version = self.expected_version, engine.facts.weight_version
        if expected is None:
            return ""
        if version != expected:
            return f"{STALE}: it serves weights {version!r}, the fleet {expected!r}"
        with self._changed:
            kept = [slot for slot in self._sharing_locked(engine.url) if slot.state is EngineState.QUARANTINED]
        wrong = [slot.engine.url for slot in kept if slot.engine.facts.weight_version != expected]
        return f"{STALE}: {wrong}, behind the same router, serve other weights than {expected!r}" if wrong else ""

    @property
    def is_closed(self) -> bool:
        """Whether everybody is turned away."""
        with self._changed:
            return self._closed

    # --- under the lock ---

    def _returned_locked(self, slot: Slot) -> tuple[EngineState, str]:
        """Of a slot that was LEAVING: as before, but for weights that the fleet has left behind meanwhile."""
        if slot.before[0] is EngineState.LIVE and (stale := self.staleness(slot.engine)):
            return EngineState.QUARANTINED, stale
        return slot.before

    def _some_locked(self, url: str | None) -> list[Slot]:
        return [slot for name, slot in self._slots.items() if url in {None, name}]

    def _sharing_locked(self, url: str | None) -> list[Slot]:
        """Those to which a request may have gone that was meant for ``url``: it alone, or all behind its router."""
        slot = self._slots.get(url) if url is not None else None
        front = slot.engine.front if slot is not None else url
        return [slot for slot in self._slots.values() if url is None or slot.engine.front == front]

    def _states_locked(self) -> set[EngineState]:
        return {slot.state for slot in self._slots.values()}

    def _wake_locked(self) -> None:
        call_all(self._slots)
        self._changed.notify_all()
        self._room.notify_all()
