"""Schedules that mean no good: actors are lost, killed and held back while jobs, aborts and drains go on.

Whatever the order: each sample is delivered once, the books balance, no engine that has work of ours is called idle,
and nothing is left at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rolloutsync import Status
from rolloutsync.jobs import Job
from rolloutsync.remote import LinkDead
from rolloutsync.sim import SimFleet
from tests.client.kit import ENDLESS, check_sample, params
from tests.fleet.conftest import MakeFleet
from tests.fleet.driver import RETRY, TIMES, DrivenFleet, station_links
from tests.wire import eventually

TOKENS = 20
LONG = replace(TIMES, engine_wait_s=30.0)
KINDS = ("take", "report", "stand")


def busy(engines: SimFleet) -> int:
    return sum(engine.state()["in_flight"] for engine in engines.engines)


class Schedule:
    """One run: a fleet, and a die."""

    def __init__(self, fleet: DrivenFleet, engines: SimFleet, seed: int) -> None:
        self.fleet = fleet
        self.engines = engines
        self.dice = random.Random(seed)
        self.jobs: list[tuple[Job, list[list[int]], int]] = []  # with its prompts, and how often was called off before
        self.called_off = 0
        self.numbers = iter(range(1, 30_000))
        self.drains = 0
        self.story: list[str] = []

    def run(self, steps: int) -> None:
        acts = [self.start, self.start, self.endless, self.abort, self.drain, self.drain_own, self.lose, self.crash]
        acts += [self.heal, self.heal, self.hold, self.let_go, self.let_go, self.cancel, self.move]
        self.start()
        for _ in range(steps):
            act: Callable[[], object] = self.dice.choice(acts)
            self.story.append(act.__name__)
            act()
        self.finish()

    # --- work ---

    def start(self, sampling: dict[str, object] | None = None) -> None:
        batch = [[5, next(self.numbers)] for _ in range(self.dice.randint(1, 20))]
        job = self.fleet.start(batch, sampling or params(TOKENS), on_error="return")
        self.jobs.append((job, batch, self.called_off if sampling is None else -1))

    def endless(self) -> None:
        self.start(ENDLESS)

    def abort(self) -> None:
        self.let_all_go("report")  # an abort waits for its samples
        self.let_all_go("take")
        self.heal()
        number = self.dice.randrange(len(self.jobs))
        job, batch, _ = self.jobs[number]
        job.abort(5.0)
        self.jobs[number] = (job, batch, -1)

    def cancel(self) -> None:
        future = self.fleet.submit([5, next(self.numbers)], ENDLESS)
        future.cancel()

    def drain(self) -> None:
        self.called_off += 1
        report = self.fleet.abort_until_idle(1.5, keep_closed=True, raise_on_timeout=False)
        if report.idle:
            self.drains += 1
            assert busy(self.engines) == 0, f"{self.story}: {report}"
        self.fleet.resume()

    def drain_own(self) -> None:
        self.called_off += 1
        self.fleet.abort_until_idle(0.5, scope="own", raise_on_timeout=False)

    def move(self) -> None:
        """An engine goes, and comes back."""
        url = self.engines[self.dice.randrange(3)]
        self.fleet.remove_engine(url)
        if self.dice.random() < 0.5:
            self.start()
        self.fleet.add_engine(url)

    # --- harm ---

    def lose(self) -> None:
        self.dice.choice(self.fleet.links).lose()

    def crash(self) -> None:
        self.dice.choice(self.fleet.links).crash()

    def heal(self) -> None:
        for link in self.fleet.links:
            if link._lost is not LinkDead:
                link.revive()

    def hold(self) -> None:
        self.dice.choice(self.fleet.links).hold(self.dice.choice(KINDS))

    def let_go(self) -> None:
        self.let_all_go(self.dice.choice(KINDS))

    def let_all_go(self, kind: str) -> None:
        for link in self.fleet.links:
            link.let_go(kind)

    # --- the end ---

    def finish(self) -> None:
        for kind in KINDS:
            self.let_all_go(kind)
        self.heal()
        for job, _, before in self.jobs:
            if before < 0:
                job.abort(10.0)  # the endless ones, before which others wait
        for job, batch, before in self.jobs:
            if before == self.called_off:
                for sample, ids in zip(job.result(), batch, strict=True):
                    check_sample(sample, ids, TOKENS)
        report = self.fleet.abort_until_idle(20.0, keep_closed=True)
        assert busy(self.engines) == 0, f"{self.story}: {report}"
        self.fleet.resume()
        for job, batch, _ in self.jobs:
            for sample, ids in zip(job.result(), batch, strict=True):
                assert sample.status in {Status.ABORTED, Status.TRUNCATED}, f"{self.story}: {sample.error}"
                assert sample.prompt.input_ids is not None
                assert sample.prompt.input_ids.tolist() == ids
                if sample.status is Status.TRUNCATED:
                    check_sample(sample, ids, TOKENS)
        audit = self.fleet.audit()
        assert audit.balanced, f"{self.story}: {audit}"
        assert not audit.open
        assert audit.dropped == 0
        check_sample(self.fleet.generate([[5]], params(4))[0], [5], 4)


def play(make_fleet: MakeFleet, engines: SimFleet, seed: int, steps: int, *, shared: bool) -> None:
    patient = replace(RETRY, max_attempts=50)  # so that nothing may fail
    make = station_links(engine_concurrency=4, retry=patient)
    fleet = make_fleet(engines, actors=2 if shared else 3, shared=shared, make=make, retry=patient, timeouts=LONG)
    fleet.core.ready()
    schedule = Schedule(fleet, engines, seed)
    try:
        schedule.run(steps)
    except BaseException:
        print(f"seed {seed}, shared {shared}: {schedule.story}")
        raise
    fleet.close()
    eventually(lambda: busy(engines) == 0, "nothing is left")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that does not follow is killed soon."""
    monkeypatch.setattr("rolloutsync.actors._STAND_S", 0.3)


@pytest.mark.parametrize("shared", [False, True])
def test_a_short_schedule(
    engines: SimFleet, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr("rolloutsync.actors._STAND_S", 0.3)
    play(make_fleet, engines, 5, 10, shared=shared)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_long_schedule(engines: SimFleet, make_fleet: MakeFleet, impatient: None, seed: int, shared: bool) -> None:
    play(make_fleet, engines, seed, 40, shared=shared)
