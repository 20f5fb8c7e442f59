"""Every verb of a client, carried out by actors in this process on simulated engines."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rolloutsync import NotIdleError, Prompt, Status, WeightUpdateError
from rolloutsync.errors import BatchError, RolloutError
from rolloutsync.remote import LinkDead
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, check_sample, generations, params, prompts
from tests.client.weightkit import nothing_is_held, refuse, slowly
from tests.fleet.conftest import MakeFleet
from tests.fleet.driver import TIMES, DrivenFleet, lane_states
from tests.wire import eventually

pytestmark = pytest.mark.slow


def running(fleet: SimFleet) -> int:
    return sum(engine.state()["running"] for engine in fleet.engines)


def busy(fleet: SimFleet) -> int:
    return sum(engine.state()["in_flight"] for engine in fleet.engines)


def all_up(fleet: DrivenFleet) -> None:
    fleet.core.ready()
    eventually(lambda: set(lane_states(fleet)) == {"up"}, "all actors are up")


def tokens(fleet: SimFleet) -> list[int]:
    return [row["tokens"] for row in generations(fleet)]


def looks(fleet: SimFleet) -> list[int]:
    return [engine.state()["requests"].get("/v1/loads", 0) for engine in fleet.engines]


def await_running(fleet: SimFleet, count: int) -> None:
    eventually(lambda: running(fleet) == count, f"{count} run, not {running(fleet)}")


def in_balance(fleet: DrivenFleet, admitted: int) -> None:
    audit = fleet.audit()
    assert audit.balanced, str(audit)
    assert (audit.admitted, audit.delivered, len(audit.open)) == (admitted, admitted, 0)
    stats = fleet.stats()
    assert (stats.admitted, stats.open, stats.waiting) == (admitted, 0, 0)


def states(client: Any) -> dict[str, str]:
    return {status.url: str(status.state) for status in client.engines()}


@pytest.mark.parametrize("shared", [False, True])
def test_generate(engines: SimFleet, make_fleet: MakeFleet, shared: bool) -> None:
    """In input order, exactly what the engines say; every engine is used, by its actors."""
    fleet = make_fleet(engines, shared=shared)
    all_up(fleet)
    samples = fleet.generate(prompts(12), params(6), n=2)
    for number, sample in enumerate(samples):
        check_sample(sample, prompts(12)[number // 2], 6)
        assert (sample.index, sample.member) == divmod(number, 2)
    assert len({sample.engine for sample in samples}) >= 2
    in_balance(fleet, 24)
    stats = fleet.stats()
    assert sum(engine.requests for engine in stats.engines.values()) == 24
    assert sum(engine.tokens for engine in stats.engines.values()) == stats.tokens == 24 * 6


def test_jobs_futures_and_partials(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """An abort touches one job, a cancel one sample; partials go on where they were cut."""
    fleet = make_fleet(engines)
    with slowly(engines.engines):
        one, two = fleet.start(prompts(4), ENDLESS), fleet.start(prompts(4), params(60))
        future = fleet.submit([9], ENDLESS)
        await_running(engines, 9)
        eventually(lambda: all(row["tokens"] for row in generations(engines)), "all have tokens")
        partials = one.abort(10.0)
        assert [sample.status for sample in partials] == [Status.ABORTED] * 4
        assert all(len(sample.output_ids) for sample in partials)
        assert future.cancel()
        assert future.result(10.0).status is Status.ABORTED
    for sample, ids in zip(two.result(), prompts(4), strict=True):
        check_sample(sample, ids, 60)
    short = [replace(s, prompt=replace(s.prompt, sampling_params=params(len(s.output_ids) + 3))) for s in partials]
    for sample, part in zip(fleet.generate(short), partials, strict=True):
        assert sample.status is Status.TRUNCATED
        assert len(sample.output_ids) == len(part.output_ids) + 3
    assert sum(engine.state()["aborts"]["abort_all"] for engine in engines.engines) == 0
    in_balance(fleet, 13)


def test_collect_and_map(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines)
    collected = fleet.collect(prompts(20), params(5), n=2, target=4, accept=lambda group: group[0].index % 2 == 0)
    assert len(collected.groups) == 4
    assert all(group[0].index % 2 == 0 for group in collected.groups)

    def episode(turns: Any, item: list[int]) -> int:
        first = turns.generate(item, params(3))
        second = turns.generate([*item, *first.output_ids.tolist()], params(2))
        assert first.engine == second.engine
        return len(first.output_ids) + len(second.output_ids)

    assert [each.value for each in fleet.map(episode, prompts(6))] == [5] * 6
    audit = fleet.audit()
    assert audit.balanced
    assert not audit.open
    assert busy(engines) == 0


def test_abort_until_idle(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """What runs, what waits at actors, and what waits here."""
    fleet = make_fleet(engines, settings={"engine_concurrency": 4})
    job = fleet.start(prompts(60), ENDLESS)
    await_running(engines, 12)
    report = fleet.abort_until_idle(10.0)
    assert report.idle, str(report)
    assert busy(engines) == 0
    assert Counter(sample.attempts for sample in job.result()) == {0: 48, 1: 12}
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    in_balance(fleet, 60)
    check_sample(fleet.generate([[5]], params(4))[0], [5], 4)
    text = fleet.dump()
    assert "actors:\n  actor-0 on this process is up, 0 tasks, room for 8\n" in text


def test_scope_own_leaves_others_alone(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet, other = make_fleet(engines), make_fleet(engines, actors=1)
    with slowly(engines.engines):
        ours, theirs = fleet.start(prompts(6), ENDLESS), other.start(prompts(3), params(60))
        await_running(engines, 9)
        report = fleet.abort_until_idle(10.0, scope="own")
    assert (report.scope, report.idle) == ("own", True)
    assert {sample.status for sample in ours.result()} == {Status.ABORTED}
    for sample, ids in zip(theirs.result(), prompts(3), strict=True):
        check_sample(sample, ids, 60)
    assert sum(engine.state()["aborts"]["abort_all"] for engine in engines.engines) == 0
    check_sample(fleet.generate([[5]], params(4))[0], [5], 4)


def test_keep_closed(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines)
    fleet.generate([[5]], params(2))
    fleet.abort_until_idle(10.0, keep_closed=True)
    before = len(generations(engines))
    later = in_thread(lambda: fleet.generate([[6]], params(4), timeout=5.0))
    eventually(lambda: fleet.stats().waiting == 1, "it waits here")
    assert {link.client.core.fleet.gate for link in fleet.links} == {"hold"}
    assert len(generations(engines)) == before
    fleet.resume()
    check_sample(later.result(10.0)[0], [6], 4)


def test_a_task_that_is_under_way_is_not_idle(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """Nobody knows where it will be: no engine of that actor is proven idle before it has come and ended."""
    fleet = make_fleet(engines, actors=1)
    fleet.generate([[5]], params(2))
    (link,) = fleet.links
    link.hold("take")
    job = fleet.start([[6]], ENDLESS)
    eventually(lambda: link.under_way("take") == 1, "it is under way")
    drain = in_thread(lambda: fleet.abort_until_idle(10.0))
    eventually(lambda: link.client.core.fleet.gate == "abort", "the gate is closed")
    sweeps = looks(engines)
    eventually(
        lambda: all(now > before + 2 for now, before in zip(looks(engines), sweeps, strict=True)),
        "each engine has been asked again and again",
    )
    assert not drain.done()
    link.let_go("take")
    assert drain.result(10.0).idle
    assert [(sample.status, sample.attempts) for sample in job.result()] == [(Status.ABORTED, 0)]


def test_a_task_that_arrives_after_the_gate_is_open_again(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines, actors=1)
    fleet.generate([[5]], params(2))
    (link,) = fleet.links
    link.hold("take")
    job = fleet.start([[6]], ENDLESS)
    eventually(lambda: link.under_way("take") == 1, "it is under way")
    report = fleet.abort_until_idle(0.5, raise_on_timeout=False)
    assert [each.rids for each in report.engines] == [("not known yet",)] * 3
    link.let_go("take")
    assert [(sample.status, sample.attempts) for sample in job.result()] == [(Status.ABORTED, 0)]
    assert len(generations(engines)) == 1


def test_quiesced(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """Proven idle and paused inside; afterwards everything goes on."""
    fleet = make_fleet(engines)
    job = fleet.start(prompts(6), ENDLESS)
    await_running(engines, 6)
    with fleet.quiesced(timeout=10.0):
        assert busy(engines) == 0
        assert all(engine.state()["paused"] for engine in engines.engines)
        later = fleet.start([[7]], params(4))
        eventually(lambda: fleet.stats().waiting == 1, "it waits")
        paused = [status.paused for link in fleet.links for status in link.client.engines()]
        assert paused == [True] * 3
    check_sample(later.result()[0], [7], 4)
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    nothing_is_held(engines, fleet)


def test_hold_keeps_what_runs(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines)
    with slowly(engines.engines, 0.01):
        job = fleet.start(prompts(6), params(60))
        await_running(engines, 6)
        with fleet.quiesced("hold"):
            later = fleet.start([[7]], params(4))
            eventually(lambda: fleet.stats().waiting == 1, "it waits")
            eventually(lambda: tokens(engines) == tokens(engines), "the last step has ended")
            assert sum(tokens(engines)) < 6 * 60
    for sample, ids in zip(job.result(), prompts(6), strict=True):
        check_sample(sample, ids, 60)
    check_sample(later.result()[0], [7], 4)


@pytest.mark.slow
def test_a_pause_is_no_death_to_the_actors(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """Their watchers know who holds the engine."""
    dead = replace(TIMES, dead_s=0.6, control_s=0.5)
    fleet = make_fleet(engines, settings={"timeouts": dead})
    with slowly(engines.engines, 0.01):
        job = fleet.start(prompts(6), params(60))
        await_running(engines, 6)
        fleet.pause("in_place")
        looked = threading.Event()
        assert not looked.wait(1.5), "longer than dead_s: nothing else tells that a watcher did nothing"
        assert {state for link in fleet.links for state in states(link.client).values()} == {"live"}
        fleet.resume()
    for sample, ids in zip(job.result(), prompts(6), strict=True):
        check_sample(sample, ids, 60)
        assert sample.attempts == 1


def test_weights(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """All actors use the new version; a stale engine gets no traffic from any of them, until it has it, too."""
    fleet = make_fleet(engines, shared=True)
    fleet.update_weights_from_disk("ckpt/w", version="1")
    first = fleet.generate(prompts(6), params(4))
    assert {span.version for sample in first for span in sample.weight_spans} == {"1"}
    refuse(engines.engines[1], "/update_weights_from_disk")
    with pytest.raises(WeightUpdateError):
        fleet.update_weights_from_disk("ckpt/w", version="2")
    assert {link.client.core.fleet.expected_version for link in fleet.links} == {"2"}
    for link in fleet.links:
        assert states(link.client)[engines[1]] == "quarantined"
    second = fleet.generate(prompts(12), params(4))
    assert {sample.engine for sample in second} == {engines[0], engines[2]}
    assert {span.version for sample in second for span in sample.weight_spans} == {"2"}
    fleet.update_weights_from_disk("ckpt/w", version="3")
    eventually(lambda: all(set(states(link.client).values()) == {"live"} for link in fleet.links), "all are back")
    third = fleet.generate(prompts(12), params(4))
    assert {sample.status for sample in third} == {Status.TRUNCATED}
    assert {sample.engine for sample in third} == set(engines)


def test_answers_with_new_weights_make_no_engine_stale(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """1. The first engine goes on. 2. Its request ends. 3. The second goes on a second later. 4. The gate opens."""
    fleet = make_fleet(engines[:2], actors=1)
    fleet.update_weights_from_disk("ckpt/w", version="1")
    job = fleet.start(prompts(2), params(200))
    await_running(engines, 2)
    with fleet.weight_update("2", mode="hold") as update:
        update.from_disk("ckpt/w")
        engines.engines[1].add_fault(Fault(kind="delay", path="/continue_generation", seconds=1.0))
    assert [sample.status for sample in job.result()] == [Status.TRUNCATED] * 2
    assert set(states(fleet.links[0].client).values()) == {"live"}


def test_engines_come_and_go(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines[:2])
    fleet.generate([[5]], params(2))
    fleet.add_engine(engines[2])
    eventually(lambda: sum(link.station._live_room() for link in fleet.links) == 60, "actors have them")
    assert {s.engine for s in fleet.generate(prompts(30), params(4))} == set(engines)
    fleet.remove_engine(engines[0])
    assert {s.engine for s in fleet.generate(prompts(30), params(4))} == {engines[1], engines[2]}
    with pytest.raises(ValueError, match="is not one of this client's engines"):
        fleet.remove_engine(engines[0])


@pytest.mark.slow
def test_a_silent_engine_is_not_idle(make_fleet: MakeFleet) -> None:
    """At the deadline the actors' sockets are cut, and the error names engine and requests."""
    with SimFleet(engines=2, tokens_per_second=500.0) as own:
        fleet = make_fleet(own)
        all_up(fleet)
        job = fleet.start(prompts(4), ENDLESS)
        await_running(own, 4)
        own.engines[0].freeze()
        with pytest.raises(NotIdleError, match=r"[1-3] of ours in flight \([0-9a-f]{32}") as caught:
            fleet.abort_until_idle(1.0)
        assert [each.url for each in caught.value.report.left] == [own[0]]
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        own.engines[0].thaw()


# --- actors that are lost ---


def test_an_actor_that_dies_costs_an_attempt(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """Its samples are made again; what it left is aborted, and each sample comes once."""
    fleet = make_fleet(engines)
    with slowly(engines.engines):
        job = fleet.start(prompts(6), params(40))
        await_running(engines, 6)
        fleet.links[0].crash()
        fleet.links[0].revive()
    for sample, ids in zip(job.result(), prompts(6), strict=True):
        check_sample(sample, ids, 40)
    eventually(lambda: busy(engines) == 0, "nothing is left")
    in_balance(fleet, 6)


def test_engines_of_a_dead_actor_are_others(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines)
    fleet.generate([[5]], params(2))
    fleet.links[0].crash(LinkDead)
    eventually(lambda: lane_states(fleet)[0] == "gone", "it is gone")
    eventually(lambda: fleet.links[1].station._live_room() == 60, "the other has all")
    assert {s.engine for s in fleet.generate(prompts(30), params(4))} == set(engines)
    fleet.links[1].crash()
    fleet.links[1].revive()
    assert {s.engine for s in fleet.generate(prompts(30), params(4))} >= {engines[1]}
    eventually(lambda: fleet.links[1].station._live_room() == 60, "its next process has all, too")


def test_a_drain_while_an_actor_is_out_of_reach(engines: SimFleet, make_fleet: MakeFleet) -> None:
    """Its process lives on with requests that wait for an engine: it sends nothing after the proof."""
    fleet = make_fleet(engines, actors=1, settings={"engine_concurrency": 1})
    job = fleet.start(prompts(8), ENDLESS)
    await_running(engines, 3)
    fleet.links[0].lose()
    eventually(lambda: lane_states(fleet) == ["joining"], "it is out of reach")
    assert fleet.abort_until_idle(10.0, keep_closed=True).idle
    assert busy(engines) == 0
    assert len(job.result()) == 8
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    fleet.resume()
    check_sample(fleet.generate([[5]], params(4))[0], [5], 4)


def test_all_actors_are_gone(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines, timeouts=replace(TIMES, engine_wait_s=0.3))
    fleet.generate([[5]], params(2))
    for link in fleet.links:
        link.crash(LinkDead)
    with pytest.raises(BatchError, match=r"no actor with a live engine within 0\.3 s: actor-0 on this process is gone"):
        fleet.generate([[6]], params(2))


def test_an_actor_that_does_not_follow_is_replaced(
    engines: SimFleet, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gate would stay open: it is killed, and a drain proves what it says."""
    monkeypatch.setattr("rolloutsync.actors._STAND_S", 0.3)
    fleet = make_fleet(engines)
    job = fleet.start(prompts(6), ENDLESS)
    await_running(engines, 6)
    fleet.links[0].hold("stand")
    assert fleet.abort_until_idle(10.0).idle
    assert busy(engines) == 0
    assert fleet.links[0].kills[0] is True
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    fleet.links[0].let_go("stand")
    check_sample(fleet.generate([[5]], params(4))[0], [5], 4)


def test_close_with_everything_under_way(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines, settings={"engine_concurrency": 2})
    job = fleet.start(prompts(40), ENDLESS)
    await_running(engines, 6)
    assert fleet.close() == []
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    in_balance(fleet, 40)
    with pytest.raises(RolloutError, match="closed"):
        fleet.generate([[5]])
    eventually(lambda: busy(engines) == 0, "engines have seen it")


def test_a_seed_is_each_members_own(engines: SimFleet, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engines)
    prompt = Prompt(input_ids=prompts(1)[0], sampling_params=params(4, sampling_seed=3))  # type: ignore[arg-type]
    samples = fleet.generate([prompt], n=3)
    assert len({tuple(sample.output_ids.tolist()) for sample in samples}) == 3
