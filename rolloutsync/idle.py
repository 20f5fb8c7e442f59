"""abort_until_idle: a fan-out of sweeps behind a closed gate, and the report of what they proved."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.errors import Cut, NotIdleError, Phase, RolloutError, TransportError
from rolloutsync.gate import GateMode
from rolloutsync.proof import IdleState
from rolloutsync.slot import EngineState
from rolloutsync.sweep import EngineDrain, Sweep
from rolloutsync.threads import fan_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet
    from rolloutsync.order import Order
    from rolloutsync.slot import Lease

log = logging.getLogger("rolloutsync.idle")
_AFTER_CUT_S = 1.0
_CONTINUE_S = 2.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_COLUMNS = ("engine", "state", "sweeps", "aborts", "seconds", "running", "waiting", "tokens", "ours", "detail")


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What ``abort_until_idle`` found, engine by engine. ``print`` shows it as a table.

    Attributes:
        engines: One ``EngineDrain`` for each engine, in the fleet's order.
        seconds: The whole drain.
        scope: "engine" or "own".
    """

    engines: tuple[EngineDrain, ...]
    seconds: float
    scope: str = "engine"

    @property
    def idle(self) -> bool:
        """Whether every engine is proven idle, or gone (scope "own": whether nothing of ours is left there)."""
        if self.scope == "own":
            return not any(engine.rids for engine in self.engines)
        return all(engine.state.quiet and not engine.rids for engine in self.engines)

    @property
    def left(self) -> tuple[EngineDrain, ...]:
        """The engines for which that does not hold."""
        return tuple(e for e in self.engines if e.rids or (self.scope == "engine" and not e.state.quiet))

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_row(engine) for engine in self.engines)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        word = "idle" if self.idle else "NOT idle"
        return "\n".join([*lines, f"{len(self.engines)} engines, {word} after {self.seconds:.2f} s"])


def _row(drain: EngineDrain) -> tuple[str, ...]:
    counts = (drain.running, drain.waiting, drain.tokens, len(drain.rids))
    numbers = (str(drain.sweeps), str(drain.aborts), f"{drain.seconds:.2f}", *map(str, counts))
    return (drain.url, drain.state.value, *numbers, (drain.detail or drain.basis)[:80])


class Drainer:
    """Runs drains of one fleet. Thread-safe: engine-wide drains that overlap are one drain.

    Args:
        fleet: To be drained.
        clock: Time.
        name: Of the client, for thread names.
        drop_waiting: Ends ABORTED what no thread has taken yet; called once the gate is closed.
    """

    def __init__(self, fleet: Fleet, clock: Clock, name: str, drop_waiting: Callable[[], None]) -> None:
        self._fleet = fleet
        self._drop_waiting = drop_waiting
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()  # guards: _running. Never held while draining.
        self._running: _Shared | None = None

    # --- engine-wide ---

    def drain(self, timeout: float, *, keep_closed: object | None, raise_on_timeout: bool) -> DrainReport:
        """Close the gate, abort, prove idle; open the gate again, or leave it on hold in ``keep_closed``'s name."""
        deadline = Deadline.after(self._clock, timeout)
        return self._behind_gate(lambda: self._together(deadline), keep_closed, raise_on_timeout=raise_on_timeout)

    def drain_own(self, timeout: float, *, keep_closed: object | None, raise_on_timeout: bool) -> DrainReport:
        """The same for this client's requests alone: nobody else's are touched, nothing is proven of the engines."""

        def drain() -> DrainReport:
            deadline = Deadline.after(self._clock, timeout)
            for engine in self._fleet.engines():
                self._continue(engine, deadline)
            return self.abort_own(deadline.within(timeout), lambda _: True)

        return self._behind_gate(drain, keep_closed, raise_on_timeout=raise_on_timeout)

    def _behind_gate(
        self, drain: Callable[[], DrainReport], keep_closed: object | None, *, raise_on_timeout: bool
    ) -> DrainReport:
        """Drain behind a token of this drain's own, which nobody else can take back; hold the gate before it is."""
        token = object()
        self._fleet.close_gate(token, GateMode.ABORT)
        try:
            self._drop_waiting()
            report = drain()
            if keep_closed is not None and report.idle:
                self._fleet.close_gate(keep_closed, GateMode.HOLD)
        finally:
            self._fleet.open_gate(token)
        if not report.idle and raise_on_timeout:
            raise NotIdleError(_not_idle(report), report=report)
        return report

    def _together(self, deadline: Deadline) -> DrainReport:
        """Join the drain that is running, or run one for all who come meanwhile.

        Whoever has joined keeps to its own deadline, and drains anew where the other's came first.
        """
        while True:
            with self._lock:
                shared, mine = self._running, self._running is None
                if shared is None:
                    shared = self._running = _Shared()
            if mine:
                return self._lead(shared, deadline)
            shared.ended.wait(deadline.remaining())
            if deadline.expired or (shared.report is not None and shared.report.idle):
                return shared.report or self._unfinished()

    def _lead(self, shared: _Shared, deadline: Deadline) -> DrainReport:
        try:
            shared.report = self._all(deadline)
            return shared.report
        finally:
            with self._lock:
                self._running = None
            shared.ended.set()

    def _unfinished(self) -> DrainReport:
        """For a call whose time is up while another call's drain goes on."""
        detail = "another call's drain is still at work here"
        drains = [
            EngineDrain(engine.url, IdleState.UNKNOWN, rids=tuple(self._fleet.rids(engine.url)), detail=detail)
            for engine in self._fleet.engines()
        ]
        return DrainReport(tuple(drains), 0.0)

    def _all(self, deadline: Deadline) -> DrainReport:
        begun = self._clock.monotonic()
        engines = self._fleet.engines()
        outcomes = fan_out(f"{self._name}-drain", [_bind(self.one, engine, deadline) for engine in engines])
        drains = tuple(outcome.get() for outcome in outcomes)
        return DrainReport(drains, self._clock.monotonic() - begun)

    def one(self, engine: Engine, deadline: Deadline) -> EngineDrain:
        """Drain one engine; at the deadline, shut the sockets of what is left there (engines abort on disconnect)."""
        url = engine.url
        result = self._sweep(engine, deadline)
        if result.state is IdleState.GONE:
            self._fleet.set_state(url, EngineState.DOWN, result.detail)
            if engine.front != url:  # what of ours was meant for it may run at others, whose sweeps wait for it
                result = replace(result, rids=())
        if result.rids or not result.state.quiet:
            self._fleet.cut(engine, Cut.DRAIN)
            self._fleet.await_none(url, _AFTER_CUT_S)
        if result.state is IdleState.GONE and engine.front == url:  # what was in flight there has ended with it
            result = replace(result, rids=tuple(self._fleet.rids(url)))
        self._fleet.set_proven(url, result.state.quiet and not result.rids)
        return result

    def _continue(self, engine: Engine, deadline: Deadline) -> None:
        """End our own pause first: a paused engine answers no abort and its load stands still.

        Before each sweep anew, and with a share of the time: a pause may be under way while the drain runs.
        """
        if not self._fleet.is_paused(engine.url):
            return
        share = Deadline.after(self._clock, deadline.within(_CONTINUE_S))
        try:
            engine.call(engine.dialect.resume(), deadline=share)
        except RolloutError as error:
            log.warning("engine %s could not be continued before its drain: %s", engine.url, error.message)
            return
        self._fleet.set_paused(engine.url, False)

    def _sweep(self, engine: Engine, deadline: Deadline) -> EngineDrain:
        fleet, url = self._fleet, engine.url
        return Sweep(
            engine,
            own=lambda: fleet.rids(url),
            settle=lambda seconds: fleet.await_none(url, seconds),
            rest=fleet.nap,
            prepare=lambda: self._continue(engine, deadline),
            clock=self._clock,
            deadline=deadline,
        ).run()

    # --- our own requests alone ---

    def abort_own(self, timeout: float, of: Callable[[Order], bool]) -> DrainReport:
        """Abort the requests of some orders by id and await their answers; nobody else's are touched."""
        begun, deadline = self._clock.monotonic(), Deadline.after(self._clock, timeout)
        by_front: dict[str, list[Lease]] = defaultdict(list)
        for lease in self._fleet.leases(of=of):
            by_front[lease.engine.front].append(lease)
        calls = [_bind(self._own_at, leases[0].engine, deadline, of) for leases in by_front.values()]
        drains = [outcome.get() for outcome in fan_out(f"{self._name}-abort", calls)]
        return DrainReport(tuple(drains), self._clock.monotonic() - begun, scope="own")

    def _own_at(self, engine: Engine, deadline: Deadline, of: Callable[[Order], bool]) -> EngineDrain:
        begun, pause_s, sweeps, aborts = self._clock.monotonic(), _FIRST_PAUSE_S, 0, 0
        while (left := self._fleet.leases(engine.url, of=of)) and not deadline.expired:
            sweeps += 1
            aborts += _abort_each(engine, [lease.rid for lease in left], deadline)
            self._fleet.await_none(engine.url, deadline.within(pause_s), of=of)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
        rids = tuple(lease.rid for lease in left)
        for rid in rids:
            engine.cut(Cut.ABORT, rid=rid)
        cleared = not rids or self._fleet.await_none(engine.url, _AFTER_CUT_S, of=of)
        took = self._clock.monotonic() - begun
        detail = "" if not rids else "no answer to the abort: sockets shut" + ("" if cleared else ", threads remain")
        state = IdleState.IDLE if not rids else IdleState.UNKNOWN
        return EngineDrain(engine.url, state, sweeps, aborts, took, rids=rids, detail=detail)


class _Shared:
    """One engine-wide drain and all who wait for it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.report: DrainReport | None = None  # stays None if the drain itself broke off


def _bind(call: Callable[..., EngineDrain], *args: object) -> Callable[[], EngineDrain]:
    return lambda: call(*args)


def _abort_each(engine: Engine, rids: list[str], deadline: Deadline) -> int:
    """Send the aborts; how many were received. Ends at the first that was not: the engine does not listen now."""
    for sent, rid in enumerate(rids):
        try:
            engine.abort(rid, deadline=deadline)
        except RolloutError as error:
            refused = isinstance(error, TransportError) and error.phase is Phase.REFUSED
            level = logging.DEBUG if refused else logging.WARNING
            log.log(level, "abort of %s and %d more at %s: %s", rid, len(rids) - sent - 1, engine.url, error.message)
            return sent
    return len(rids)


def _not_idle(report: DrainReport) -> str:
    parts = [
        f"{e.url}: {e.state.value}, {e.running} running, {e.waiting} waiting, {e.tokens} tokens, "
        f"{len(e.rids)} of ours in flight ({', '.join(e.rids[:3]) or 'none'})" + (f", {e.detail}" if e.detail else "")
        for e in report.left
    ]
    return f"not idle after {report.seconds:.1f} s: " + "; ".join(parts)
