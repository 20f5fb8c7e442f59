"""Is an engine dead? One sign is never enough, and a silent generate is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import Facts, LoadKind, LoadReading, unknown_load
from rolloutsync.dialects.every import SGLANG, VLLM
from rolloutsync.errors import Cut, EngineHTTPError, Phase, TransportError
from rolloutsync.vigil import Vigil
from tests.fakes import FakeClock

DEAD_S = 30.0
LOOK_S = 5.0


class Patient:
    """An engine whose probes answer as told; one that hangs takes all the time that it is given."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.load_says: Callable[[], Any] = lambda: busy(clock.monotonic())
        self.scheduler_says = True
        self.asked = 0
        self.facts = Facts()
        self.dialect = SGLANG

    def hang(self, deadline: Deadline) -> None:
        self.clock.advance(deadline.within(1000.0))

    def load(self, *, deadline: Deadline) -> LoadReading:
        said = self.load_says()
        if said is None:
            self.hang(deadline)
            raise TransportError("silent", phase=Phase.SENT, cut=Cut.DEADLINE)
        if isinstance(said, Exception):
            raise said
        reading: LoadReading = said
        return reading

    def scheduler_answers(self, deadline: Deadline) -> bool:
        self.asked += 1
        if not self.scheduler_says:
            self.hang(deadline)
        return self.scheduler_says


def busy(*stamps: float) -> LoadReading:
    return LoadReading(kind=LoadKind.BUSY, running=4, waiting=0, tokens=100, stamps=stamps or None)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(auto=True)


@pytest.fixture
def patient(clock: FakeClock) -> Patient:
    return Patient(clock)


@pytest.fixture
def watch(clock: FakeClock, patient: Patient) -> Callable[..., tuple[float, str | None]]:
    """Looks every five seconds for so long; when and why the engine was found dead."""
    vigil = Vigil(patient, clock, DEAD_S)  # type: ignore[arg-type]

    def run(seconds: float, answered_at: Callable[[], float | None] = lambda: None) -> tuple[float, str | None]:
        begun = clock.monotonic()
        while clock.monotonic() - begun < seconds:
            clock.advance(LOOK_S)
            reason = vigil.look(answered_at())
            if reason is not None:
                return clock.monotonic() - begun, reason
        return clock.monotonic() - begun, None

    return run


Watch = Callable[..., tuple[float, "str | None"]]


def test_moving_timestamps_are_life(watch: Watch, patient: Patient) -> None:
    """An hour of silent generates on an engine that publishes its load: never touched, the scheduler never asked."""
    assert watch(3600.0)[1] is None
    assert patient.asked == 0


def test_live_answers_are_life(watch: Watch, patient: Patient) -> None:
    """Engines up to 0.5.12 make each load answer anew, without a timestamp."""
    patient.load_says = busy
    assert watch(3600.0)[1] is None
    assert patient.asked == 0


def test_a_load_that_lags_is_no_sign_of_life(watch: Watch, patient: Patient) -> None:
    """vLLM's front end tells the gauges of the last step for ever; its core is asked."""
    patient.dialect, patient.load_says = VLLM, busy
    assert watch(600.0)[1] is None
    assert patient.asked > 100
    patient.scheduler_says = False
    reason = watch(600.0)[1]
    assert reason is not None
    assert "its load says nothing of its core, and the scheduler has answered no question" in reason


def test_an_engine_that_answers_nothing_is_dead(watch: Watch, patient: Patient) -> None:
    """Thirty seconds after the first probe without an answer."""
    patient.load_says = lambda: None
    seconds, reason = watch(3600.0)
    assert 30.0 <= seconds - LOOK_S <= 36.0
    assert reason == "no answer to load probes for 30 s: silent"


def test_refused_probes_alone_wait_as_long(watch: Watch, patient: Patient) -> None:
    """A server that shuts down in good order refuses new connections and finishes its requests."""
    patient.load_says = lambda: TransportError("refused", phase=Phase.REFUSED)
    seconds, reason = watch(3600.0)
    assert seconds >= 30.0 + LOOK_S
    assert reason is not None
    assert "refused" in reason


def test_answers_to_generates_are_life(watch: Watch, clock: FakeClock, patient: Patient) -> None:
    """A web server too busy for probes, whose generates are answered all the time, is not dead."""
    patient.load_says = lambda: None
    assert watch(600.0, answered_at=clock.monotonic)[1] is None


def test_one_late_probe_proves_nothing(watch: Watch, clock: FakeClock, patient: Patient) -> None:
    """Every third probe is answered."""
    turns = iter(range(10_000))
    patient.load_says = lambda: busy(clock.monotonic()) if next(turns) % 3 == 2 else None
    assert watch(3600.0)[1] is None


def test_a_paused_engine_is_alive(watch: Watch, patient: Patient) -> None:
    """Paused by somebody else: the load stands still, the scheduler answers."""
    patient.load_says = lambda: busy(7.0)
    assert watch(3600.0)[1] is None
    assert patient.asked > 100


def test_a_frozen_scheduler_is_dead(watch: Watch, patient: Patient) -> None:
    """The web server answers from a snapshot that stands still, the scheduler answers nothing."""
    patient.load_says, patient.scheduler_says = lambda: busy(7.0), False
    seconds, reason = watch(3600.0)
    assert 30.0 <= seconds <= 30.0 + 4 * LOOK_S
    assert reason is not None
    assert "timestamps stand still (4 running, 0 waiting), and the scheduler has answered no question for" in reason


def test_one_frozen_rank_is_enough(watch: Watch, clock: FakeClock, patient: Patient) -> None:
    """Its requests would wait for ever, whatever the other ranks do."""
    patient.load_says, patient.scheduler_says = lambda: busy(clock.monotonic(), 7.0), False
    assert watch(3600.0)[1] is not None


def test_a_long_forward_pass_is_alive(watch: Watch, clock: FakeClock, patient: Patient) -> None:
    """Twenty seconds without a snapshot and without an answer, again and again."""
    patient.load_says = lambda: busy(clock.monotonic() // 20)
    patient.scheduler_says = False
    assert watch(3600.0)[1] is None


@pytest.mark.parametrize("said", [unknown_load("{}"), EngineHTTPError("500", status=500)])
@pytest.mark.parametrize("answers", [True, False])
def test_a_load_without_sense_asks_the_scheduler(watch: Watch, patient: Patient, said: Any, answers: bool) -> None:
    patient.load_says, patient.scheduler_says = lambda: said, answers
    assert (watch(300.0)[1] is None) == answers


def test_answers_to_generates_come_from_a_scheduler(watch: Watch, clock: FakeClock, patient: Patient) -> None:
    """Its load makes no sense and it answers no question, but its only scheduler finishes requests all the time."""
    patient.load_says, patient.scheduler_says = lambda: unknown_load("{}"), False
    assert watch(600.0, answered_at=clock.monotonic)[1] is None


def test_our_own_shortage_says_nothing(watch: Watch, patient: Patient) -> None:
    """B34: no descriptor here for a probe."""
    patient.load_says = lambda: TransportError("too many open files", phase=Phase.LOCAL)
    assert watch(600.0)[1] is None


def test_an_engine_that_recovers_begins_anew(watch: Watch, clock: FakeClock, patient: Patient) -> None:
    """Twenty silent seconds, an answer, twenty silent seconds: no sum."""
    patient.load_says = lambda: None
    assert watch(20.0)[1] is None
    patient.load_says = lambda: busy(clock.monotonic())
    assert watch(5.0)[1] is None
    patient.load_says = lambda: None
    assert watch(20.0)[1] is None
