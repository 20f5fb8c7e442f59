"""One engine brought to idle, on a clock of its own: how often it is aborted, and what is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import LoadKind, LoadReading, unknown_load
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.engine import Engine
from rolloutsync.errors import Cut, EngineHTTPError, Phase, RolloutError, TransportError
from rolloutsync.proof import IdleState
from rolloutsync.sweep import EngineDrain, Sweep
from tests.fakes import FakeClock


class FakeEngine:
    """An engine that publishes snapshots, and remembers when it was aborted.

    ``obeys``: the number of the abort that it honours. ``publishes_s``: seconds between snapshots; 0 answers live
    without stamps. ``held``: tokens of sessions. ``dies``: an abort while idle for more than half a second kills it.
    """

    url = "http://fake:1"
    dialect = SGLangDialect()

    def __init__(
        self,
        clock: FakeClock,
        *,
        running: int = 0,
        obeys: int = 1,
        publishes_s: float = 0.25,
        held: int = 0,
        aborted_after_s: float = 0.0,
        dies: bool = True,
    ) -> None:
        self.clock = clock
        self.running = running
        self.held = held
        self.own: list[str] = []
        self.aborts: list[float] = []
        self.answers: Callable[[], LoadReading] | None = None
        self._obeys = obeys
        self._publishes_s = publishes_s
        self._aborted_after_s = aborted_after_s
        self._dies = dies
        self._ends_at: float | None = None
        self._idle_since = clock.monotonic() if running == 0 else None

    def know(self, deadline: Deadline) -> None:
        """It is known."""

    def load(self, *, deadline: Deadline) -> LoadReading:
        """The last snapshot, or the state itself."""
        if self.answers is not None:
            return self.answers()
        if self._publishes_s == 0:
            return self._reading(self.clock.monotonic(), None)
        stamp = self.clock.monotonic() // self._publishes_s * self._publishes_s
        return self._reading(stamp, (stamp,))

    def _reading(self, at: float, stamps: tuple[float, ...] | None) -> LoadReading:
        running = self.running if self._ends_at is None or at < self._ends_at else 0
        kind = LoadKind.BUSY if running or self.held else LoadKind.ZERO
        return LoadReading(kind=kind, running=running, tokens=running * 10 + self.held, stamps=stamps)

    def abort(self, rid: str | None, *, deadline: Deadline) -> None:
        """Honour it, or not; die of it where real ones do."""
        assert rid is None
        now = self.clock.monotonic()
        if self._dies and not self.held:
            idle = self._ends_at is not None and now - self._ends_at > 0.5
            idle = idle or (self._idle_since is not None and now - self._idle_since > 0.5)
            assert not idle, "killed by an abort while idle"
        self.aborts.append(now)
        assert sum(now - 1.0 < at for at in self.aborts) <= 5, "killed by more than five aborts within a second"
        if len(self.aborts) >= self._obeys and self._ends_at is None:
            self._ends_at = now + self._aborted_after_s
            self.own.clear()


def _sweep(engine: FakeEngine, timeout: float = 30.0) -> EngineDrain:
    clock = engine.clock

    def settle(seconds: float) -> None:
        if engine.own:
            clock.advance(seconds)

    return Sweep(
        cast("Engine", engine),
        own=lambda: list(engine.own),
        settle=settle,
        rest=clock.advance,
        clock=clock,
        deadline=Deadline.after(clock, timeout),
    ).run()


def _engine(**given: Any) -> FakeEngine:
    return FakeEngine(FakeClock(), **given)


@pytest.mark.parametrize("publishes_s", [0.0, 0.25, 1.0])
def test_an_idle_engine_is_proven_without_an_abort(publishes_s: float) -> None:
    """Some versions die of one."""
    engine = _engine(publishes_s=publishes_s)
    engine.clock.advance(2.0)
    report = _sweep(engine)
    assert report.state is IdleState.IDLE
    assert engine.aborts == []
    assert (report.aborts, report.running, report.tokens, report.detail) == (0, 0, 0, "")
    assert report.seconds <= 2 * publishes_s + 0.2
    assert report.sweeps >= 2


@pytest.mark.parametrize("publishes_s", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("aborted_after_s", [0.0, 0.3, 1.5])
def test_a_busy_engine_is_aborted_until_idle(publishes_s: float, aborted_after_s: float) -> None:
    """And not once more, neither on a snapshot from before nor when it is done."""
    engine = _engine(running=7, publishes_s=publishes_s, aborted_after_s=aborted_after_s)
    report = _sweep(engine)
    assert report.state is IdleState.IDLE
    assert 1 <= len(engine.aborts) == report.aborts <= 5
    assert report.seconds <= aborted_after_s + 2 * publishes_s + 2.1
    if aborted_after_s == 0.0:
        assert len(engine.aborts) == 1


def test_our_own_request_is_aborted_before_the_engine_shows_it() -> None:
    """A snapshot may be from before it arrived: the first abort does not wait for it."""
    engine = _engine(running=0, dies=False)
    engine.own = ["r"]
    report = _sweep(engine)
    assert report.state is IdleState.IDLE
    assert len(engine.aborts) == 1
    assert report.seconds < 2.0


def test_an_answer_on_its_way_is_not_aborted_again_and_again() -> None:
    """The engine is idle by its own word while we still read: one abort, then only waiting (B19)."""
    engine = _engine(running=0, obeys=99, dies=False)
    engine.own = ["r"]
    engine_clock = engine.clock
    report = _sweep(engine, timeout=10.0)
    assert len(engine.aborts) == 1
    assert report.state is IdleState.BUSY
    assert report.rids == ("r",)
    assert engine_clock.monotonic() <= 1011.0


def test_zeros_from_before_our_own_had_ended_do_not_count() -> None:
    """Two readings are needed that were begun after it, however many zeros were seen while it was in flight."""
    engine = _engine(dies=False)
    engine.own = ["r"]
    begun: list[bool] = []  # for each reading, whether something of ours was in flight then

    def answers() -> LoadReading:
        begun.append(bool(engine.own))
        if len(begun) == 5:
            engine.own.clear()
        return LoadReading(kind=LoadKind.ZERO, stamps=(float(len(begun)),))

    engine.answers = answers
    engine.abort = lambda rid, *, deadline: engine.aborts.append(0.0)  # type: ignore[method-assign]
    assert _sweep(engine).state is IdleState.IDLE
    assert begun == [True] * 5 + [False] * 2


def test_never_idle_ends_at_the_deadline_with_few_aborts() -> None:
    """B18: the drain returns in time and names what remained; it never hammers."""
    engine = _engine(running=3, obeys=99, dies=False)
    report = _sweep(engine, timeout=10.0)
    assert report.state is IdleState.BUSY
    assert (report.running, report.waiting, report.tokens) == (3, 0, 30)
    assert 10.0 <= report.seconds <= 11.0
    assert 5 <= len(engine.aborts) <= 10.0 / 2.0 + 6
    gaps = [later - sooner for sooner, later in zip(engine.aborts, engine.aborts[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 2.25


def test_an_engine_that_honours_only_the_fourth_abort() -> None:
    """It is aborted again as long as its own word says that it runs."""
    engine = _engine(running=1, obeys=4)
    report = _sweep(engine)
    assert report.state is IdleState.IDLE
    assert len(engine.aborts) == 4
    assert report.seconds < 5.0


def test_no_abort_on_a_stale_snapshot() -> None:
    """A snapshot that has not changed since the last abort says nothing about what that one did."""
    engine = _engine(running=2)
    stale = LoadReading(kind=LoadKind.BUSY, running=2, stamps=(5.0,))
    engine.answers = lambda: stale
    report = _sweep(engine, timeout=20.0)
    assert len(engine.aborts) == 1
    assert report.state is IdleState.FROZEN


def test_frozen_is_reported_and_never_idle() -> None:
    """A zero that stands still: paused, loading or hung."""
    engine = _engine()
    engine.answers = lambda: LoadReading(kind=LoadKind.ZERO, stamps=(5.0,))
    report = _sweep(engine, timeout=20.0)
    assert report.state is IdleState.FROZEN
    assert engine.aborts == []
    assert report.seconds >= 20.0


def _fails(error: RolloutError) -> Callable[[], LoadReading]:
    def answer() -> LoadReading:
        raise error

    return answer


@pytest.mark.parametrize(
    "answers",
    [
        lambda: unknown_load("it is null"),
        _fails(TransportError("it is null", phase=Phase.SENT)),
        _fails(TransportError("it is null", phase=Phase.CONNECT)),
    ],
)
def test_an_unknown_load_is_never_idle(answers: Callable[[], LoadReading]) -> None:
    """A failed probe is not a zero; and nothing is aborted that may not run."""
    engine = _engine()
    engine.answers = answers
    report = _sweep(engine, timeout=10.0)
    assert report.state is IdleState.UNKNOWN
    assert report.detail == "it is null"
    assert engine.aborts == []
    assert report.sweeps <= 12


def test_an_unknown_load_with_our_own_in_flight_is_aborted_with_patience() -> None:
    """What we sent does run there, whatever the load says."""
    engine = _engine(running=1, obeys=3, dies=False)
    engine.answers = lambda: unknown_load("?")
    engine.own = ["r"]
    report = _sweep(engine, timeout=10.0)
    assert report.state is IdleState.UNKNOWN
    assert len(engine.aborts) == 3
    assert report.rids == ()


def test_a_refused_connection_is_gone() -> None:
    """Nothing runs where nobody listens: quiet, at once."""
    engine = _engine()
    engine.answers = _fails(TransportError("connection refused", phase=Phase.REFUSED))
    report = _sweep(engine)
    assert report.state is IdleState.GONE
    assert report.state.quiet
    assert (report.sweeps, report.aborts, report.detail) == (1, 0, "connection refused")


def test_a_closed_client_ends_it() -> None:
    """No reading comes to anything any more, and nobody rests between them: the time that is left is not used up."""
    engine = _engine(running=1)
    engine.answers = _fails(TransportError("cut by us", phase=Phase.SENT, cut=Cut.CLOSE))
    report = _sweep(engine)
    assert (report.state, report.sweeps, report.aborts) == (IdleState.UNKNOWN, 1, 0)


def test_a_failed_abort_is_told_and_tried_again() -> None:
    """The reason is in the report if that was the end of it."""
    engine = _engine(running=1, dies=False)

    def refuse(rid: str | None, *, deadline: Deadline) -> None:
        engine.aborts.append(engine.clock.monotonic())
        raise EngineHTTPError("no aborts here", status=404)

    engine.abort = refuse  # type: ignore[method-assign]
    report = _sweep(engine, timeout=5.0)
    assert report.state is IdleState.BUSY
    assert "no aborts here" in report.detail
    assert len(engine.aborts) > 1


@pytest.mark.parametrize("publishes_s", [0.0, 0.25, 1.0])
def test_tokens_of_sessions_are_idle_after_a_while(publishes_s: float) -> None:
    """One abort, in case it was a request in prefill; then they are watched, not aborted."""
    engine = _engine(held=500, publishes_s=publishes_s)
    report = _sweep(engine)
    assert report.state is IdleState.IDLE
    assert report.tokens == 500
    assert len(engine.aborts) == 1
    assert 2.0 <= report.seconds <= 10.0


def test_growing_tokens_are_a_prefill_and_aborted_again() -> None:
    """An abort that came too early for it is repeated."""
    engine = _engine(obeys=99, dies=False)
    clock = engine.clock

    def prefill() -> LoadReading:
        now = clock.monotonic()
        return LoadReading(kind=LoadKind.BUSY, tokens=int(now * 100), stamps=(now,))

    engine.answers = prefill
    report = _sweep(engine, timeout=5.0)
    assert report.state is IdleState.BUSY
    assert len(engine.aborts) >= 4


def test_the_deadline_holds_when_it_is_over_already() -> None:
    """One look, no abort."""
    engine = _engine(running=1)
    report = _sweep(engine, timeout=0.0)
    assert report.state is IdleState.BUSY
    assert (report.sweeps, engine.aborts) == (1, [])
