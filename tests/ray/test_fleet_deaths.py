"""A RolloutFleet whose actors die, on engines that never notice that a client has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from rolloutsync import EngineUnavailableError, RolloutError, Status, Timeouts, WeightUpdateError
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.fleet import SimEngine
from tests.client.kit import ENDLESS, check_sample, params, prompts
from tests.processes import await_true
from tests.ray.conftest import await_running, counts, running
from tests.ray.fleets import FLEET, MakeFleet, fleets, kill, lines, rids_of, tasks, up, warm

if TYPE_CHECKING:
    from rolloutsync.ray_fleet import RolloutFleet

pytestmark = pytest.mark.ray

WAIT_S = 6.0
LONG = 2500  # tokens, 5 s: more than it takes to notice a death on a busy machine
GONE = {"actor_options": {"max_restarts": 0}}


@pytest.fixture
def make_fleet(cluster: ModuleType, engines: SimFleet) -> Iterator[MakeFleet]:
    with fleets(engines.urls) as make:
        yield make


def test_a_killed_actor_costs_its_own_samples_an_attempt(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """kill -9 in mid-batch: all samples come; what it left at its engines is aborted there; no other one notices."""
    fleet = make_fleet()
    warm(fleet)
    job = fleet.start(prompts(40), params(LONG), n=2)
    await_running(engines, 80)
    before = rids_of(engines, "running")
    assert len(before) == 80
    kill(fleet, 0)
    samples = job.result()
    for sample in samples:
        check_sample(sample, prompts(40)[sample.index], LONG)
    assert [(s.index, s.member) for s in samples] == [(index, member) for index in range(40) for member in range(2)]
    aborted, finished = rids_of(engines, "aborted"), rids_of(engines, "finished")
    assert aborted <= before
    assert len(aborted) == 40
    assert before - aborted <= finished
    delivered = {str(s.rid) for s in samples}
    assert len(delivered) == 80
    assert delivered <= finished
    assert len(finished) == 81  # and what it was warmed with: nothing was made twice
    assert rids_of(engines, "disconnected") == set()
    audit = fleet.audit()
    assert (audit.balanced, audit.open) == (True, ())
    await_true(lambda: up(fleet) == 2, fleet.dump, 30.0)
    again = fleet.generate(prompts(200), params(5))
    assert {s.engine for s in again} == set(engines.urls)
    assert {s.status for s in again} == {Status.TRUNCATED}


def test_a_restarted_actor_clears_its_engines_first(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Though the driver could not name all that was left there, none of it runs when the first new request comes."""
    fleet = make_fleet(engines.urls[:2])
    warm(fleet)
    job = fleet.start(prompts(20), params(600))
    await_running(engines, 20)
    left = [Foreign(engine) for engine in engines.engines[:2]]  # as if sent in its last moment: nobody was told
    try:
        kill(fleet, 0)
        assert {s.status for s in job.result()} == {Status.TRUNCATED}
        await_true(lambda: up(fleet) == 2, fleet.dump, 30.0)
        states = [engine.state() for engine in engines.engines[:2]]
        unknown = [row["state"] for state in states for row in state["generations"] if row["rid"].startswith("orphan")]
        assert sorted(unknown) == ["aborted", "running"]
    finally:
        for request in left:
            request.abort()


class Foreign:
    """A request that the fleet knows nothing of."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self.rid = f"orphan{engine.port}"
        self._thread = threading.Thread(target=self._call)
        self._thread.start()
        await_true(lambda: self.rid in {row["rid"] for row in engine.state()["generations"]}, "the foreign request")

    def _call(self) -> None:
        body = {"rid": self.rid, "input_ids": [9, 9], "sampling_params": ENDLESS}
        self._engine.call("POST", "/generate", body, timeout=60.0)

    def abort(self) -> None:
        self._engine.call("POST", "/abort_request", {"rid": self.rid})
        self._thread.join()


def test_what_an_actor_left_at_shared_engines_is_aborted_by_name(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Where others use the engines too, only its own requests end: the others' samples need no second attempt."""
    fleet = make_fleet(share_engines=True)
    warm(fleet)
    job = fleet.start(prompts(40), params(LONG), n=2)
    await_running(engines, 80)
    lost = tasks(fleet)[0]
    kill(fleet, 0)
    for sample in job.result():
        check_sample(sample, prompts(40)[sample.index], LONG)
    assert len(rids_of(engines, "aborted")) == lost
    assert sum(engine.state()["aborts"]["abort_all"] for engine in engines.engines) == 0
    await_true(lambda: up(fleet) == 2, fleet.dump, 30.0)


def test_engines_of_an_actor_that_is_gone_for_good(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Its engines go to the other, which makes everything; the fleet's words say so."""
    fleet = make_fleet(**GONE)
    warm(fleet)
    job = fleet.start(prompts(40), params(600))
    await_running(engines, 40)
    kill(fleet, 0)
    for sample in job.result():
        check_sample(sample, prompts(40)[sample.index], 600)
    await_true(lambda: lines(fleet, " is gone, ") == 1, fleet.dump)
    assert "actor-0 on " in fleet.dump()
    job = fleet.start(prompts(200), params(200))
    await_true(lambda: min(counts(engines)) > 0, lambda: f"requests at all four: {counts(engines)}")
    samples = job.result()
    assert {s.engine for s in samples} == set(engines.urls)
    assert {s.status for s in samples} == {Status.TRUNCATED}
    fleet.update_weights_from_disk("new", "after")
    assert {s.weight_spans[0].version for s in fleet.generate(prompts(200), params(5))} == {"after"}


def test_all_actors_gone_for_good(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Every sample is FAILED soon, with an error that names the actors; the books balance; nothing hangs."""
    fleet = make_fleet(**GONE, timeouts=replace(FLEET["timeouts"], engine_wait_s=WAIT_S))
    warm(fleet)
    job = fleet.start(prompts(20), ENDLESS, on_error="return")
    await_running(engines, 20)
    for number in (0, 1):
        kill(fleet, number)
    begun = time.monotonic()
    samples = job.result()
    assert time.monotonic() - begun < WAIT_S + 4.0
    assert {s.status for s in samples} == {Status.FAILED}
    for sample in samples:
        assert isinstance(sample.error, EngineUnavailableError)
        assert "actor-0 on " in sample.error.message
        assert "actor-1 on " in sample.error.message
    assert (fleet.stats().failed, fleet.stats().open, fleet.audit().balanced) == (20, 0, True)
    assert fleet.abort_until_idle().idle
    assert running(engines) == 0
    with pytest.raises(RolloutError, match="actor-0"):
        fleet.generate(prompts(2), params(5))
    begun = time.monotonic()
    assert fleet.close() == []
    assert time.monotonic() - begun < 5.0


def test_stats_and_audit_right_after_a_death(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Nothing is counted twice or lost, at any moment."""
    fleet = make_fleet()
    warm(fleet)
    job = fleet.start(prompts(40), params(500))
    await_running(engines, 40)
    kill(fleet, 1)
    while not job.done:
        stats, audit = fleet.stats(), fleet.audit()
        assert stats.admitted == 41
        assert stats.open + stats.truncated == 41
        assert audit.balanced
    assert (fleet.stats().truncated, fleet.stats().failed) == (41, 0)


def test_a_drain_while_an_actor_dies(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Idle is still proven by the engines, and what the dead actor had ends as it was admitted."""
    fleet = make_fleet()
    warm(fleet)
    job = fleet.start(prompts(60), ENDLESS)
    await_running(engines, 60)
    kill(fleet, 0)
    report = fleet.abort_until_idle()
    assert report.idle
    assert running(engines) == 0
    samples = job.result()
    assert {s.status for s in samples} == {Status.ABORTED}
    assert 0 < sum(len(s.output_ids) > 0 for s in samples) < 60


def test_a_restarted_actor_keeps_the_engines_that_it_had_last(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Engines that came later are still its own after a restart, those that went are not."""
    fleet = make_fleet(engines.urls[:2])
    warm(fleet)
    for url in engines.urls[2:]:
        fleet.add_engine(url)
    for url in engines.urls[:2]:
        fleet.remove_engine(url)
    for number in (0, 1):
        kill(fleet, number)
    await_true(lambda: up(fleet) == 0, fleet.dump)
    await_true(lambda: up(fleet) == 2, fleet.dump, 30.0)
    job = fleet.start(prompts(160), params(400))
    await_true(lambda: counts(engines) == [0, 0, 80, 80], lambda: f"80 at each new engine: {counts(engines)}")
    assert {s.engine for s in job.result()} == set(engines.urls[2:])


def test_a_restarted_actor_knows_which_engine_is_stale(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """One that did not get the weights gets no traffic from anybody, until it has them."""
    fleet = make_fleet()
    warm(fleet)
    refusal = {"success": False, "message": "no such checkpoint"}
    engines.engines[0].add_fault(Fault(kind="status", status=400, path="/update_weights_from_disk", body=refusal))
    with pytest.raises(WeightUpdateError, match="no such checkpoint"):
        fleet.update_weights_from_disk("new", "w2")
    for number in (None, 0, 1):
        if number is not None:
            restart(fleet, number)
        samples = fleet.generate(prompts(300), params(5))
        assert {s.weight_spans[0].version for s in samples} == {"w2"}
        assert {s.engine for s in samples} == set(engines.urls[1:])
    fleet.update_weights_from_disk("new", "w3")
    samples = fleet.generate(prompts(300), params(5))
    assert {s.weight_spans[0].version for s in samples} == {"w3"}
    await_true(lambda: used(fleet) == set(engines.urls), fleet.dump)


def used(fleet: RolloutFleet) -> set[str | None]:
    return {s.engine for s in fleet.generate(prompts(300), params(5))}


def restart(fleet: RolloutFleet, number: int) -> None:
    """Kill an actor, and await its return."""
    kill(fleet, number)
    await_true(lambda: up(fleet) < len(fleet.actors), fleet.dump)
    await_true(lambda: up(fleet) == len(fleet.actors), fleet.dump, 30.0)


def test_actors_that_do_not_come_are_named(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """No node has what they ask for: the samples fail in time, and closing does not wait for them."""
    waits = Timeouts(engine_wait_s=1.0, control_s=5.0)
    fleet = make_fleet(actor_options={"num_cpus": 64}, timeouts=waits, actor_wait_s=2.0)
    samples = fleet.generate(prompts(2), params(5), on_error="return")
    assert all("actor-0" in str(s.error) and "actor-1" in str(s.error) for s in samples)
    await_true(lambda: lines(fleet, " is gone, ") == 2, fleet.dump)
