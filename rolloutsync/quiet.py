"""Quiet: a block in which the engines are proven idle, or held in place, and after which they always go on."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.errors import (
    ControlError,
    Cut,
    DeadlineExceededError,
    NotIdleError,
    Phase,
    RolloutError,
    TransportError,
)
from rolloutsync.gate import GateMode
from rolloutsync.proof import IdleState
from rolloutsync.slot import EngineState
from rolloutsync.threads import fan_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rolloutsync.clock import Clock
    from rolloutsync.dialects.base import Call
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet
    from rolloutsync.idle import Drainer, DrainReport
    from rolloutsync.sweep import EngineDrain

log = logging.getLogger("rolloutsync.quiet")


class Quiet:
    """Makes the engines of one fleet quiet. Thread-safe; blocks nest and overlap, and the last one out resumes.

    Args:
        fleet: Whose engines.
        drainer: Proves them idle.
        clock: Time.
        name: Of the client, for thread names.
    """

    def __init__(self, fleet: Fleet, drainer: Drainer, clock: Clock, name: str) -> None:
        self._fleet = fleet
        self._drainer = drainer
        self._clock = clock
        self._name = name
        self._token = object()  # the gate's
        # _changed's lock guards: all that follows. Never held across I/O: whoever enters or leaves is _moving.
        self._changed = threading.Condition()
        self._moving = False
        self._guests = 0  # drains, pauses and resumes at work: no block begins meanwhile
        self._holders: list[int] = []  # threads that are in a block, once for each
        self._depth = 0
        self._mode = ""
        self._report: DrainReport | None = None
        self._engines: tuple[Engine, ...] = ()
        self._paused: tuple[Engine, ...] = ()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those that are quiet, within the block."""
        with self._changed:
            return self._engines

    @property
    def mode(self) -> str:
        """Of the outermost block."""
        with self._changed:
            return self._mode

    @contextmanager
    def guest(self, verb: str) -> Iterator[None]:
        """No block begins while ``verb`` is at work; raises RolloutError inside one: it would take the quiet away."""
        with self._changed:
            if self._moving or self._depth:
                raise RolloutError(f"{verb} is refused while quiesced() or a weight update holds the engines")
            self._guests += 1
        try:
            yield
        finally:
            with self._changed:
                self._guests -= 1
                self._changed.notify_all()

    def check_not_mine(self, verb: str) -> None:
        """Raise RolloutError in a thread that is in a block of its own: ``verb`` would wait for ever for its end."""
        with self._changed:
            mine = threading.get_ident() in self._holders
        if mine:
            advice = "use start(), and take the result after the block"
            raise RolloutError(f"{verb} would wait for ever for the end of the block that it is called in: {advice}")

    @contextmanager
    def block(self, mode: str, timeout: float) -> Iterator[DrainReport | None]:
        """Close the gate, drain (mode "abort"), pause; always continue and open the gate after.

        Raises:
            NotIdleError: A live engine could not be proven idle within ``timeout`` seconds.
            ControlError: A live engine could not be paused.
            ValueError: Inside a block of another mode, but for "abort", which is stronger than all.
        """
        report = self._enter(mode, Deadline.after(self._clock, timeout))
        me = threading.get_ident()
        self._holders.append(me)
        try:
            yield report
        finally:
            self._holders.remove(me)
            self._leave()

    def let_go(self, seconds: float) -> None:
        """The client closes: continue what a block of another thread still holds, within so many seconds."""
        with self._changed:
            held = self._paused
        if held:
            self._continue(held, Deadline.after(self._clock, seconds))

    # --- in and out ---

    def _enter(self, mode: str, deadline: Deadline) -> DrainReport | None:
        with self._changed:
            while self._moving or self._guests:
                if deadline.expired:
                    doing = "draining, pausing or resuming" if self._guests else f"entering or leaving {self._mode!r}"
                    raise DeadlineExceededError(f"another thread is still {doing}")
                self._clock.wait(self._changed, deadline.remaining())
            if self._depth:
                _check_nested(mode, self._mode)
                self._depth += 1
                return self._report
            self._moving, self._mode = True, mode
        try:
            report = self._quieten(mode, deadline)
        except BaseException:
            self._waken()
            raise
        self._settle(depth=1, report=report)
        return report

    def _leave(self) -> None:
        with self._changed:
            if self._depth > 1:
                self._depth -= 1
                return
            self._moving = True
        self._waken()

    def _settle(self, *, depth: int, report: DrainReport | None) -> None:
        with self._changed:
            self._moving, self._depth, self._report = False, depth, report
            self._changed.notify_all()

    def _waken(self) -> None:
        """Continue what we have paused, open the gate."""
        with self._changed:
            paused, self._paused, self._engines = self._paused, (), ()
        try:
            self._continue(paused)
        finally:
            self._fleet.open_gate(self._token)
            self._settle(depth=0, report=None)

    # --- making quiet ---

    def _quieten(self, mode: str, deadline: Deadline) -> DrainReport | None:
        self._fleet.close_gate(self._token, GateMode.HOLD)
        report = self._drain(deadline) if mode == "abort" else None
        idle = None if report is None else {drain.url for drain in report.engines if not drain.rids and _idle(drain)}
        there = self._fleet.engines(EngineState.LIVE, EngineState.QUARANTINED)
        self._pause([engine for engine in there if idle is None or engine.url in idle], mode)
        return report

    def _drain(self, deadline: Deadline) -> DrainReport:
        """Prove idle. An engine that gets no traffic anyway does not fail it; it is left out."""
        report = self._drainer.drain(deadline.remaining() or 0.0, keep_closed=None, raise_on_timeout=False)
        live = {engine.url for engine in self._fleet.engines(EngineState.LIVE)}
        busy = [drain for drain in report.left if drain.url in live]
        if busy:
            words = "; ".join(map(_told, busy))
            raise NotIdleError(f"not idle after {report.seconds:.1f} s: {words}", report=report)
        return report

    def _pause(self, engines: list[Engine], mode: str) -> None:
        """Pause those that a ``pause()`` of the user does not hold already."""
        ours = [engine for engine in engines if not self._fleet.is_paused(engine.url)]
        if mode != "wait":  # while one is waited for its requests run, and the watcher sees whether they do
            self._note_paused(ours)  # from now on it may be, should this be interrupted
        with self._changed:
            self._paused = tuple(ours)
        try:
            errors = self._each("pause", ours, lambda e: e.dialect.pause(e.dialect.weights.pause_mode(mode)))
        finally:
            self._note_paused(ours)
        with self._changed:
            self._engines = tuple(engine for engine in engines if engine not in errors)
        self._check_paused(errors)

    def _note_paused(self, engines: list[Engine]) -> None:
        for engine in engines:
            self._fleet.set_paused(engine.url, True)

    def _check_paused(self, errors: dict[Engine, RolloutError]) -> None:
        """An engine that is gone, or that got no traffic anyway, is left out; any other is an error."""
        for engine, error in errors.items():
            unsure = isinstance(error, TransportError) and not _refused(error)  # it may be paused
            self._fleet.set_paused(engine.url, unsure)
            if _refused(error):
                self._fleet.set_state(engine.url, EngineState.DOWN, error.message)
        live = self._fleet.engines(EngineState.LIVE)
        failed = {engine.url: error for engine, error in errors.items() if engine in live}
        if failed:
            words = "; ".join(f"{url}: {error.message}" for url, error in failed.items())
            raise ControlError(f"pause failed: {words}", engine=next(iter(failed)), answers={}, errors=failed)

    def _continue(self, paused: tuple[Engine, ...], deadline: Deadline | None = None) -> None:
        """Continue engines; one that does not answer gets no traffic until it is continued."""
        members = self._fleet.engines()  # one that was removed meanwhile is not ours any more, but paused by us
        held = [engine for engine in paused if engine not in members or self._fleet.is_paused(engine.url)]
        errors = self._each("resume", held, lambda engine: engine.dialect.resume(), deadline)
        for engine in held:
            if engine not in members:
                continue
            error = errors.get(engine)
            if error is None or _refused(error):
                self._fleet.set_paused(engine.url, False)
            if error is not None and not (isinstance(error, TransportError) and error.cut is Cut.CLOSE):
                state = EngineState.DOWN if _refused(error) else EngineState.QUARANTINED
                self._fleet.set_state(engine.url, state, f"not continued (resume() tries again): {error.message}")

    def _each(
        self, what: str, engines: list[Engine], call_for: Callable[[Engine], Call], deadline: Deadline | None = None
    ) -> dict[Engine, RolloutError]:
        """Make a call everywhere at once; the errors. Pausing twice is as once, so a broken one is sent again."""

        def one(engine: Engine) -> None:
            try:
                engine.call(call_for(engine), deadline=deadline)
            except TransportError as error:
                if error.cut is not None or error.phase not in {Phase.RACE, Phase.SENT, Phase.BODY}:
                    raise
                engine.call(call_for(engine), deadline=deadline, fresh=True)

        outcomes = fan_out(f"{self._name}-{what}", [_bind(one, engine) for engine in engines])
        errors: dict[Engine, RolloutError] = {}
        for engine, outcome in zip(engines, outcomes, strict=True):
            try:
                outcome.get()
            except RolloutError as error:
                errors[engine] = error
        return errors


def _idle(drain: EngineDrain) -> bool:
    return drain.state is IdleState.IDLE


def _told(drain: EngineDrain) -> str:
    counts = f"{drain.running} running, {drain.waiting} waiting, {drain.tokens} tokens, {len(drain.rids)} of ours"
    return f"{drain.url}: {drain.state.value}, {counts}" + (f", {drain.detail}" if drain.detail else "")


def _refused(error: RolloutError) -> bool:
    return isinstance(error, TransportError) and error.phase is Phase.REFUSED


def _check_nested(mode: str, outer: str) -> None:
    if outer not in {"abort", mode}:
        raise ValueError(f"mode {mode!r} is not possible inside a block of mode {outer!r}: use the same mode")


def _bind(act: Callable[[Engine], None], engine: Engine) -> Callable[[], None]:
    return lambda: act(engine)
