"""The watcher: finds out what engines are, notices those that die, and brings back those that stopped being live."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.errors import (
    Cut,
    EngineHTTPError,
    Phase,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
    WrongServerError,
    clip,
)
from rolloutsync.gate import GateMode
from rolloutsync.slot import EngineState
from rolloutsync.sweep import Sweep
from rolloutsync.threads import start_thread
from rolloutsync.vigil import Vigil

if TYPE_CHECKING:
    from rolloutsync.clock import Clock
    from rolloutsync.config import Timeouts
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet

log = logging.getLogger("rolloutsync.health")
_FIRST_PROBE_S = 0.5
_LONGEST_PROBE_S = 5.0
_PROOF_S = 30.0
_GRACE_S = 1.0
_LOOK_S = 5.0


class Watcher:
    """Probes engines. Thread-safe.

    Each engine that is not live, and each on which samples wait, has a thread of its own, so that none waits for
    another.
    """

    def __init__(self, fleet: Fleet, clock: Clock, name: str, timeouts: Timeouts) -> None:
        self._fleet = fleet
        self._clock = clock
        self._name = name
        self._dead_s = timeouts.dead_s
        self._look_s = min(_LOOK_S, timeouts.dead_s / 6)
        # _lock guards: _threads, _watching, _closed, _asked. Never held across a probe.
        self._lock = threading.Lock()
        self._watching: dict[Engine, threading.Thread] = {}
        self._asked: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._threads: dict[Engine, threading.Thread] = {}  # by absent engine; an added one is not the removed one
        self._wrong: weakref.WeakKeyDictionary[Engine, WrongServerError] = weakref.WeakKeyDictionary()
        self._closed = False

    def wrong_server(self) -> WrongServerError | None:
        """For a member that never was an engine, what it is instead."""
        wrong = self._wrong
        return next((wrong[engine] for engine in self._fleet.engines() if engine in wrong), None) if wrong else None

    def learn_new(self, limit_s: float | None = None) -> None:
        """Ask each new engine what it is, all at once.

        Blocks until all have answered, or for one second after the first live one, and for at most ``limit_s``: the
        slow ones join when they answer. An engine is asked once, however many threads call this.
        """
        with self._lock:
            fresh = [engine for engine in self._fleet.engines(EngineState.NEW) if engine not in self._asked]
            self._asked.update(fresh)
        for engine in fresh:
            try:
                start_thread(f"{self._name}-learn", lambda engine=engine: self._learn(engine))  # type: ignore[misc]
            except RuntimeError:
                self._learn(engine)
        self.notice()
        self._fleet.await_known(_GRACE_S, limit_s)

    def notice(self) -> None:
        """Start probing each engine that is not live, unless that goes on already.

        Where the system gives no more threads, the next verb tries again.
        """
        with self._lock:
            absent = [] if self._closed else self._fleet.engines(EngineState.DOWN, EngineState.QUARANTINED)
            for engine in absent:
                if engine not in self._threads:
                    self._start_locked(engine)

    def _start_locked(self, engine: Engine) -> None:
        try:
            self._threads[engine] = start_thread(f"{self._name}-health", lambda: self._run(engine))
        except RuntimeError as error:
            log.warning("engine %s is not probed for now: %s", engine.url, error)

    def watch(self, engine: Engine) -> None:
        """Watch an engine for as long as samples wait there, unless that goes on already."""
        with self._lock:
            if self._closed or engine in self._watching:
                return
            try:
                self._watching[engine] = start_thread(f"{self._name}-watch", lambda: self._watch(engine))
            except RuntimeError as error:
                log.info("engine %s is not watched for now: %s", engine.url, error)  # the workers warn already

    def _watch(self, engine: Engine) -> None:
        vigil = Vigil(engine, self._clock, self._dead_s)
        self._check_weights(engine)
        while True:
            self._fleet.nap(self._look_s)
            with self._lock:
                if self._closed or self._fleet.is_closed or not self._fleet.leases(engine.url):
                    del self._watching[engine]  # under the lock: a request that comes now starts another thread
                    return
            try:
                self._look(engine, vigil)
            except Exception:  # a thread's outermost frame: the engine must not stay unwatched
                log.exception("watching engine %s: unexpected error", engine.url)

    def _check_weights(self, engine: Engine) -> None:
        """Nobody looked at it while nothing was there, and its answers may not name the weights: was it restarted?"""
        fleet = self._fleet
        if fleet.expected_version is None or not engine.dialect.load_lags or fleet.is_paused(engine.url):
            return
        try:
            told = engine.dialect.read_version(engine.call(engine.dialect.version_call()))
        except RolloutError:
            return
        if told is None or fleet.is_paused(engine.url):
            return
        engine.heard_version(told)
        if stale := fleet.staleness(engine):
            fleet.set_state(engine.url, EngineState.QUARANTINED, stale)
            engine.cut(Cut.DEAD)

    def _look(self, engine: Engine, vigil: Vigil) -> None:
        """Probe an engine on which a sample has waited for a while. A dead one loses its requests at once."""
        waiting_since, answered_at = self._fleet.waiting(engine.url)
        young = waiting_since is None or self._clock.monotonic() - waiting_since < self._look_s
        if young or self._fleet.is_paused(engine.url):
            vigil.reset()
            return
        reason = vigil.look(answered_at)
        if reason is not None and not self._fleet.is_paused(engine.url):
            self._fleet.set_state(engine.url, EngineState.QUARANTINED, reason)
            cut = engine.cut(Cut.DEAD)
            engine.cut_control(Cut.DEAD)  # somebody may wait there for the last request to end
            log.info("engine %s: %d requests woken", engine.url, cut)
            vigil.reset()

    def close(self, timeout: float) -> list[str]:
        """End the threads (the fleet must be closed first); the names of those that did not end."""
        until = Deadline.after(self._clock, timeout)
        with self._lock:
            self._closed, threads = True, [*self._threads.values(), *self._watching.values()]
        for thread in threads:
            thread.join(until.remaining())
        return [thread.name for thread in threads if thread.is_alive()]

    def _learn(self, engine: Engine) -> None:
        state, reason = self._probe(engine)
        if state is not EngineState.LIVE:
            self._fleet.set_state(engine.url, state, reason)
        elif stale := self._fleet.staleness(engine):
            self._fleet.set_state(engine.url, EngineState.QUARANTINED, stale)
        else:
            self._join(engine)

    def _probe(self, engine: Engine) -> tuple[EngineState, str]:
        """Whether it is there. An engine that answers anything is; what it is may stay unknown."""
        try:
            engine.learn()
        except WrongServerError as error:
            if not engine.known:
                self._wrong[engine] = error
            return EngineState.DOWN, error.message
        except (EngineHTTPError, ProtocolError) as error:
            log.info("engine %s does not say what it is: %s", engine.url, clip(error.message, 200))
        except TransportError as error:
            unreachable = error.phase in {Phase.REFUSED, Phase.CONNECT, Phase.LOCAL}
            if unreachable or (error.cut is Cut.DEADLINE and not engine.is_reachable()):
                if error.phase is not Phase.LOCAL:
                    engine.forget_version()
                return EngineState.DOWN, clip(error.message, 200)
            log.info("engine %s does not say what it is: %s", engine.url, clip(error.message, 200))
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: an engine must not stay NEW for ever
            return EngineState.DOWN, f"probe failed: {type(error).__name__}: {error}"
        self._wrong.pop(engine, None)
        return (EngineState.DOWN, "its core has died") if engine.has_died() else (EngineState.LIVE, "")

    def _run(self, engine: Engine) -> None:
        pause_s = _FIRST_PROBE_S
        while True:
            self._fleet.nap(pause_s)
            pause_s = min(_LONGEST_PROBE_S, pause_s * 1.5)
            with self._lock:
                absent = self._fleet.engines(EngineState.DOWN, EngineState.QUARANTINED)
                if self._closed or self._fleet.is_closed or engine not in absent:
                    del self._threads[engine]  # under the lock: trouble noticed from now on starts another thread
                    return
            self._readmit(engine)

    def _readmit(self, engine: Engine) -> None:
        """Probe an absent engine; one that may still run something of ours must be proven idle first."""
        doubtful = engine in self._fleet.engines(EngineState.QUARANTINED) or self._fleet.orphans(engine.url)
        state, _ = self._probe(engine)
        if state is not EngineState.LIVE:
            return
        if stale := self._fleet.staleness(
            engine
        ):  # before the proof, whose aborts would hit others' requests there for long
            self._fleet.set_state(engine.url, EngineState.QUARANTINED, stale)  # it is there: the next update takes it
            self._fleet.explain(engine.url, stale)
            return
        if doubtful and not (self._runs(engine) and self._proves_idle(engine)):
            return
        self._join(engine)

    def _join(self, engine: Engine) -> None:
        """Make it live. Looks after that, not before: an update that ended meanwhile saw it live, or is seen here."""
        self._fleet.set_state(engine.url, EngineState.LIVE)
        if stale := self._fleet.staleness(engine):
            self._fleet.set_state(engine.url, EngineState.QUARANTINED, stale)

    def _runs(self, engine: Engine) -> bool:
        """Continue an engine that we left paused, as far as nobody holds it on purpose."""
        if not self._fleet.is_paused(engine.url):
            return True
        if self._fleet.gate is not GateMode.OPEN:
            return False
        try:
            engine.call(engine.dialect.resume())
        except RolloutError:
            return False
        self._fleet.set_paused(engine.url, False)
        return True

    def _proves_idle(self, engine: Engine) -> bool:
        """Abort what is left there and prove it idle; not yet if that would cut short what of ours runs there."""
        fleet, url = self._fleet, engine.url
        if fleet.leases(url):
            return False
        try:
            engine.abort(None)
        except UnsupportedError:
            if not engine.dialect.ends_on_disconnect:
                return False
        except RolloutError:
            return False
        sweep = Sweep(
            engine,
            own=lambda: fleet.rids(url),
            settle=lambda seconds: fleet.await_none(url, seconds),
            rest=fleet.nap,
            clock=self._clock,
            deadline=Deadline.after(self._clock, _PROOF_S),
        )
        return sweep.run().state.quiet
