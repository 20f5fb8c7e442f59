"""The actor's end, on a real client's core: what it takes, tells, follows and ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rolloutsync.order import Group
from rolloutsync.remote import LinkLost, Report, Standing, Task
from rolloutsync.sample import Sample, Status
from rolloutsync.sim import SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, ScriptedEngine, check_sample, generations, params, quiet
from tests.fleet.driver import RETRY, TIMES
from tests.fleet.links import Process
from tests.unit.makers import prompt
from tests.wire import eventually

OPEN = Standing(number=1)


class Kit:
    """A station, and a driver that is the test."""

    def __init__(self, urls: Any, *, sharers: int = 1, **settings: Any) -> None:
        options = {"progress": False, "retry": RETRY, "timeouts": TIMES, **settings}
        self.process = Process(urls, sharers, options)
        self.station = self.process.station
        self.ended: list[tuple[int, Sample]] = []
        self.reports: list[Report] = []
        self._keys = iter(range(1000))
        self._readers: list[threading.Thread] = []

    @property
    def fleet(self) -> Any:
        return self.process.client.core.fleet

    def hello(self, standing: Standing = OPEN, incarnation: str | None = None) -> str:
        incarnation = self.station.hello(standing, incarnation).incarnation
        self.read(incarnation)
        return incarnation

    def read(self, incarnation: str) -> None:
        def run() -> None:
            for report in self.station.reports(incarnation):
                self.reports.append(report)
                self.ended += report.ended

        self._readers.append(threading.Thread(target=run, name="reader", daemon=True))
        self._readers[-1].start()

    def task(self, tokens: Any = (5,), sampling: Any = None, **given: Any) -> Task:
        basics: dict[str, Any] = {
            "key": next(self._keys),
            "prompt": prompt(input_ids=np.array(tokens, np.int32), sampling_params=sampling or params(4)),
            "index": 0,
            "member": 0,
            "group": Group(1).number,
            "size": 1,
            "sticky": False,
            "job": 0,
            "priority": 0,
            "closings": 0,
            "seconds": None,
            "base": None,
        }
        return Task(**{**basics, **given})

    def take(self, *tasks: Task) -> None:
        self.station.take(list(tasks), self.station.incarnation)

    def await_ended(self, count: int) -> dict[int, Sample]:
        eventually(lambda: len(self.ended) >= count, f"{count} have ended, not {len(self.ended)}")
        return dict(self.ended)

    def end(self) -> None:
        self.process.end()
        for reader in self._readers:
            reader.join(10.0)
            assert not reader.is_alive()


@pytest.fixture
def station_at() -> Iterator[Callable[..., Kit]]:
    made: list[Kit] = []

    def make(urls: Any, **options: Any) -> Kit:
        made.append(Kit(urls, **options))
        return made[-1]

    yield make
    for kit in made:
        kit.end()


MakeStation = Callable[..., Kit]


def running(fleet: SimFleet) -> int:
    return sum(engine.state()["running"] for engine in fleet.engines)


# --- tasks and reports ---


def test_tasks_are_made_and_reported_once_each(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    assert kit.station.hello(OPEN, None).room == 60  # 20 each: 1.25 of what they run
    kit.read(kit.station.incarnation)
    kit.take(kit.task([5]), kit.task([6]))
    for key, sample in kit.await_ended(2).items():
        check_sample(sample, [5 + key], 4)
    placed = {each.key: each.engine for report in kit.reports for each in report.placed}
    assert placed == {key: sample.engine for key, sample in kit.ended}
    assert kit.reports[0].number == 1


def test_another_incarnation_is_refused(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    kit.hello()
    with pytest.raises(LinkLost, match=r"this is incarnation [0-9a-f]{32}, not mine"):
        kit.station.take([kit.task()], "mine")
    with pytest.raises(LinkLost, match="not mine"):
        next(kit.station.reports("mine"))


def test_a_task_that_was_packed_before_a_drain_and_arrives_after_it(engines: SimFleet, station_at: MakeStation) -> None:
    """It ends ABORTED, unsent, though the gate is open again."""
    kit = station_at(engines)
    kit.hello()
    late = kit.task(closings=0)
    kit.station.stand(Standing(number=2, mode="abort", closings=1, cuts=1))
    kit.station.stand(Standing(number=3, mode="open", closings=1, cuts=1))
    kit.take(late, kit.task([7], closings=1))
    ended = kit.await_ended(2)
    assert (ended[0].status, ended[0].attempts) == (Status.ABORTED, 0)
    check_sample(ended[1], [7], 4)
    assert len(generations(engines)) == 1


def test_a_drain_that_was_never_told_is_known_by_its_number(engines: SimFleet, station_at: MakeStation) -> None:
    """Two standings may reach it as one: what waited is called off all the same."""
    kit = station_at(engines[0], engine_concurrency=1)
    kit.hello()
    kit.take(kit.task([5], ENDLESS), kit.task([6]))
    eventually(lambda: running(engines) == 1, "one runs, one waits")
    kit.station.stand(Standing(number=9, mode="open", closings=3, cuts=3))
    assert kit.await_ended(1)[1].status is Status.ABORTED


def test_older_standings_are_ignored(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    kit.hello()
    kit.station.stand(Standing(number=5, mode="hold"))
    kit.station.stand(Standing(number=4, mode="open"))
    kit.station.stand(Standing(number=5, mode="open"))
    assert kit.fleet.gate == "hold"
    eventually(lambda: kit.reports[-1].number == 5, "it is told which holds")


def test_a_held_gate_holds(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    kit.hello()
    kit.station.stand(Standing(number=2, mode="hold"))
    kit.take(kit.task(seconds=0.2))
    eventually(lambda: kit.fleet._wanting == 1, "it waits for the gate")
    assert generations(engines) == []
    kit.station.stand(Standing(number=3, mode="open"))
    check_sample(kit.await_ended(1)[0], [5], 4)


def test_where_everything_is_is_told_with_a_closed_gate(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    kit.hello()
    kit.take(kit.task([5], ENDLESS))
    eventually(lambda: running(engines) == 1, "it runs")
    kit.station.stand(Standing(number=2, mode="hold"))
    eventually(lambda: kit.reports[-1].number == 2, "the gate is told")
    place = next(report for report in kit.reports if report.number == 2).placed[-1]
    (row,) = generations(engines)
    assert (place.rid, place.engine) == (row["rid"], engines[row["engine"]])


# --- weights and pauses ---


def test_it_follows_the_weights(engines: SimFleet, station_at: MakeStation) -> None:
    """An engine that the driver calls stale, or that bears another version, gets nothing."""
    kit = station_at(engines)
    kit.hello()
    for engine in engines.engines[:2]:
        engine.call("POST", "/update_weight_version", {"new_version": "7"})
    versions: dict[str, str | None] = {engines[0]: "7", engines[1]: "7", engines[2]: "default"}
    stale = {engines[1]: "stale: it failed"}
    kit.station.stand(Standing(number=2, expected="7", versions=versions, stale=stale))
    assert kit.fleet.expected_version == "7"
    states = {status.url: (status.state, status.reason[:5]) for status in kit.fleet.statuses()}
    assert states[engines[0]][0] == "live"
    assert states[engines[1]] == states[engines[2]] == ("quarantined", "stale")
    kit.take(*[kit.task([5 + number]) for number in range(6)])
    assert {sample.engine for sample in kit.await_ended(6).values()} == {engines[0]}


def test_paused_engines_are_known(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    kit.hello()
    kit.station.stand(Standing(number=2, mode="hold", paused=frozenset(engines[:1])))
    assert [kit.fleet.is_paused(url) for url in engines] == [True, False, False]
    kit.station.stand(Standing(number=3, mode="hold"))
    assert not any(kit.fleet.is_paused(url) for url in engines)


def test_an_engine_that_was_not_continued_gets_nothing(engines: SimFleet, station_at: MakeStation) -> None:
    """The gate is open and the driver still holds it paused: it could not be reached. It is continued first."""
    kit = station_at(engines)
    kit.hello()
    for engine in engines.engines[:1]:
        engine.call("POST", "/pause_generation", {"mode": "in_place"})
    kit.station.stand(Standing(number=2, mode="hold", paused=frozenset(engines)))
    kit.station.stand(Standing(number=3, mode="open", paused=frozenset(engines[:1])))
    assert kit.fleet.statuses()[0].state == "quarantined"
    kit.take(*[kit.task([5 + number]) for number in range(4)])
    assert engines[0] not in {sample.engine for sample in kit.await_ended(4).values()}
    eventually(lambda: kit.fleet.statuses()[0].state == "live", "it is back")
    assert not engines.engines[0].state()["paused"]


# --- ends ---


def test_a_job_is_aborted_and_stays_so(engines: SimFleet, station_at: MakeStation) -> None:
    """What waits, what runs, and what arrives later; nobody else's."""
    kit = station_at(engines[0], engine_concurrency=2)
    kit.hello()
    kit.take(kit.task([5], ENDLESS, job=1), kit.task([6], ENDLESS, job=2), kit.task([7], job=1))
    eventually(lambda: running(engines) == 2, "both run")
    kit.station.abort([1], 5.0)
    kit.take(kit.task([8], job=1))
    ended = kit.await_ended(3)
    assert {key: sample.attempts for key, sample in ended.items()} == {0: 1, 2: 0, 3: 0}
    assert {sample.status for sample in ended.values()} == {Status.ABORTED}
    assert running(engines) == 1


def test_a_driver_that_lost_it_starts_over(engines: SimFleet, station_at: MakeStation) -> None:
    """Everything that it was given is aborted, and nothing of that is told to the new reader; jobs begin anew."""
    kit = station_at(engines[0], engine_concurrency=1)
    first = kit.hello()
    kit.take(kit.task([5], ENDLESS, job=1), kit.task([6], job=1))
    eventually(lambda: running(engines) == 1, "one runs, one waits")
    eventually(lambda: bool(kit.reports and kit.reports[-1].placed), "that is told")
    second = kit.hello(Standing(number=2), first)
    assert running(engines) == 0
    kit.take(kit.task([7], job=1))
    check_sample(kit.await_ended(1)[2], [7], 4)
    assert len(kit.ended) == 1
    assert second != first


def test_what_was_sent_before_it_was_lost_and_arrives_after_is_refused(
    engines: SimFleet, station_at: MakeStation
) -> None:
    """1. A task is under way. 2. The connection breaks, it is given up. 3. Both meet again. 4. It arrives."""
    kit = station_at(engines)
    first = kit.hello()
    late = kit.task()
    kit.hello(Standing(number=2), first)
    with pytest.raises(LinkLost):
        kit.station.take([late], first)
    assert generations(engines) == []


def test_what_the_one_before_left_behind_is_aborted(engines: SimFleet, station_at: MakeStation) -> None:
    """By a new process, at engines that are its alone; not where others use them, too."""
    engines.engines[0].slow_down(0.05)
    body = {"rid": "a" * 32, "input_ids": [5], "sampling_params": ENDLESS}
    left = in_thread(lambda: engines.engines[0].call("POST", "/generate", body, 20.0))
    eventually(lambda: running(engines) == 1, "it runs")
    station_at(engines, sharers=2).hello(OPEN, "somebody else")
    assert running(engines) == 1
    station_at(engines).hello(OPEN, "somebody else")
    assert running(engines) == 0
    assert left.result(5.0)["meta_info"]["finish_reason"]["type"] == "abort"


def test_reports_are_portioned(engines: SimFleet, station_at: MakeStation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large samples come in several; each once."""
    monkeypatch.setattr("rolloutsync.station._REPORT_BYTES", 1000)
    kit = station_at(engines)
    kit.hello()
    sizes = [400, 400, 400, 2000, 10]
    with kit.station._changed:
        for key, size in enumerate(sizes):
            blank = kit.station._order_locked(kit.task(), off=False).blank()
            kit.station._ended.append((key, _with_bytes(blank, size)))
        kit.station._changed.notify_all()
    kit.await_ended(5)
    assert [[key for key, _ in report.ended] for report in kit.reports if report.ended] == [[0, 1], [2], [3], [4]]


def _with_bytes(sample: Sample, count: int) -> Sample:
    from dataclasses import replace

    return replace(sample, routed_experts=np.zeros((1, 1, count), np.uint8))


def test_a_newer_reader_ends_the_older(engines: SimFleet, station_at: MakeStation) -> None:
    kit = station_at(engines)
    incarnation = kit.hello()
    kit.read(incarnation)
    older = kit._readers[0]
    older.join(5.0)
    assert not older.is_alive()
    kit.take(kit.task())
    check_sample(kit.await_ended(1)[0], [5], 4)


def test_shut_delivers_everything(station_at: MakeStation) -> None:
    """What runs, what waits; then readers end, and nothing more is taken."""
    with ScriptedEngine(quiet) as engine:
        kit = station_at(engine.url, engine_concurrency=1)
        kit.hello()
        kit.take(kit.task(), kit.task())
        eventually(lambda: len(engine.rids()) == 1, "one is sent")
        kit.process.client.close(5.0)
        kit.station.close()
        kit._readers[0].join(5.0)
        assert not kit._readers[0].is_alive()
        assert {sample.status for _, sample in kit.ended} == {Status.ABORTED}
        assert len(kit.ended) == 2
        with pytest.raises(LinkLost, match="1 tasks were not taken: the client is closed"):
            kit.take(kit.task())


def test_ended_jobs_leave_nothing(engines: SimFleet, station_at: MakeStation) -> None:
    """Every submit is a job: a hundred thousand of them must not be kept."""
    kit = station_at(engines)
    kit.hello()
    for number in range(20):
        kit.take(kit.task([5], params(1), job=number))
    kit.await_ended(20)
    eventually(lambda: not gc.collect() and len(kit.station._stops) == 0, "they are forgotten")
