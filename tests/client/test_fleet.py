"""Where samples go: balance, groups, ranks, limits, priority, membership."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from rolloutsync import EngineState, RolloutClient
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ScriptedEngine, check_sample, generations, good, params, prompts
from tests.wire import Request, Script, answer, eventually, wait_for

MakeClient = Callable[..., RolloutClient]


def test_load_is_balanced(fleet: SimFleet, make_client: MakeClient) -> None:
    """Single samples of the same length spread evenly."""
    samples = make_client(fleet).generate(prompts(40), params(50))
    counts = Counter(sample.engine for sample in samples)
    assert set(counts) == set(fleet)
    assert max(counts.values()) <= 13


def test_a_group_stays_on_one_engine(fleet: SimFleet, make_client: MakeClient) -> None:
    """The members of a prompt share its prefix, so they share an engine."""
    client = make_client(fleet)
    samples = client.generate(prompts(1), params(50), n=16)
    assert len({sample.engine for sample in samples}) == 1


def test_groups_are_spread(fleet: SimFleet, make_client: MakeClient) -> None:
    """Many groups: nearly all of them whole (balance goes first), and every engine has its share."""
    samples = make_client(fleet).generate(prompts(16), params(400), n=4)
    homes = defaultdict(set)
    for sample in samples:
        homes[sample.index].add(sample.engine)
    assert sum(len(engines) == 1 for engines in homes.values()) >= 12
    counts = Counter(sample.engine for sample in samples)
    assert set(counts) == set(fleet)
    assert max(counts.values()) <= 24


def test_a_group_keeps_its_rank(make_client: MakeClient) -> None:
    """With data-parallel ranks the members share a rank too, and both ranks get work."""
    with SimFleet(engines=1, dp_size=2, tokens_per_second=1000.0) as fleet:
        client = make_client(fleet)
        samples = client.generate(prompts(8), params(400), n=4)
        ranks = defaultdict(set)
        for sample in samples:
            ranks[sample.index].add(sample.dp_rank)
        assert all(len(found) == 1 for found in ranks.values())
        counts = Counter(next(iter(found)) for found in ranks.values())
        assert min(counts[0], counts[1]) >= 3
        assert client.engines()[0].dp_size == 2


def test_the_users_rank_is_left_alone(make_client: MakeClient) -> None:
    """A rank in the request fields is sent as it is."""
    with SimFleet(engines=1, dp_size=2, tokens_per_second=1000.0) as fleet:
        samples = make_client(fleet).generate(prompts(6), params(4), routed_dp_rank=1)
        assert {sample.dp_rank for sample in samples} == {1}


def test_the_limit_is_never_exceeded(fleet: SimFleet, make_client: MakeClient) -> None:
    """engine_concurrency holds at every engine, whatever waits."""
    client = make_client(fleet, engine_concurrency=3)
    client.generate(prompts(60), params(20))
    assert [engine.state()["peak_running"] for engine in fleet.engines] == [3] * 4
    assert client.stats().open == 0


def test_the_engines_own_limit(make_client: MakeClient) -> None:
    """1.25 times the engine's own running limit over all its ranks, at most 512; 256 where it does not say."""
    with (
        ScriptedEngine(max_running_requests=8) as a,
        ScriptedEngine(max_running_requests=8, dp_size=2) as b,
        ScriptedEngine(max_running_requests=4000) as c,
        ScriptedEngine() as d,
    ):
        client = make_client([a.url, b.url, c.url, d.url])
        assert [status.limit for status in client.engines()] == [10, 20, 512, 256]


def test_a_crowd_is_warned_of_once(make_client: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """Above 4096 in total one warning names threads, descriptors and the fleet."""
    with ScriptedEngine() as engine:
        client = make_client(engine.url, engine_concurrency=5000)
        for _ in range(2):
            client.generate([[5]])
    assert len(warnings()) == 1
    assert "RLIMIT_NOFILE" in warnings()[0]


def test_priority_and_turns(make_client: MakeClient) -> None:
    """Higher priority first; among equals the jobs take turns; within a job its order."""

    go = threading.Event()

    def story(request: Request, number: int) -> Script:
        return [wait_for(go), *good(request)] if number == 0 else good(request)

    with ScriptedEngine(story) as engine:
        client = make_client(engine.url, engine_concurrency=1)
        plug = client.submit([1])
        eventually(lambda: len(engine.rids()) == 1, "the plug is there")
        jobs = [client.start([[10], [11], [12]]), client.start([[20], [21]]), client.start([[30]], priority=5)]
        go.set()
        for job in jobs:
            job.result()
        plug.result(5.0)
        order = [body["input_ids"][0] for body in engine.bodies()]
    assert order == [1, 30, 10, 20, 11, 21, 12]


def test_a_session_stays_on_one_engine(fleet: SimFleet, make_client: MakeClient) -> None:
    """Calls that bear the same session_id follow each other to one engine, busy as it may be; others spread."""
    client = make_client(fleet, engine_concurrency=2)
    for _ in range(3):
        samples = client.generate([{"input_ids": ids, "session_id": "a"} for ids in prompts(6)], params(4))
        others = client.generate(prompts(12), params(20), session_id=None)
        assert len({sample.engine for sample in others}) > 1
        homes = {sample.engine for sample in samples}
        assert len(homes) == 1
    again = client.submit([1, 2], params(2), session_id="a").result(10.0)
    assert {again.engine} == homes


def test_a_broken_engine_does_not_attract_what_it_broke(make_client: MakeClient) -> None:
    """A sample that failed at one engine waits for another that is full: one that fails at once always has room."""

    go = threading.Event()
    blocker = [wait_for(go)]
    with (
        ScriptedEngine(lambda request, number: [answer(b"", "500 Oops")] if number == 0 else good(request)) as a,
        ScriptedEngine(lambda request, _: [*blocker, *good(request)]) as b,
    ):
        client = make_client(b.url, engine_concurrency=1)
        blocked = client.submit([1])
        eventually(lambda: len(b.rids()) == 1, "the second engine is full")
        client.add_engine(a.url)
        second = client.submit([5])
        eventually(lambda: client.engines()[1].state is EngineState.LIVE and len(a.rids()) == 1, "it has failed there")
        go.set()
        assert blocked.result(5.0).engine == b.url
        sample = second.result(5.0)
        assert (sample.engine, sample.attempts) == (b.url, 2)
        assert len(a.rids()) == 1


def test_add_and_remove_while_running(fleet: SimFleet, make_client: MakeClient) -> None:
    """A new engine gets work at once; a removed one finishes what it has and gets nothing more."""
    client = make_client(fleet[0], engine_concurrency=4)
    job = client.start(prompts(60), params(60))
    eventually(lambda: fleet.engines[0].state()["running"] == 4, "the first engine is full")
    client.add_engine(fleet[1])
    client.add_engine(fleet[1] + "/")
    eventually(lambda: fleet.engines[1].state()["running"] == 4, "the new engine works")
    client.remove_engine(fleet[0])
    with pytest.raises(ValueError, match="not one of this client's engines"):
        client.remove_engine(fleet[0])
    started = fleet.engines[0].state()["started"]
    samples = job.result()
    for sample, ids in zip(samples, prompts(60), strict=True):
        check_sample(sample, ids, 60)
    assert {sample.attempts for sample in samples} == {1}
    assert fleet.engines[0].state()["started"] <= started + 1
    assert [status.url for status in client.engines()] == [fleet[1]]
    copy = RolloutClient(fleet[1])
    assert repr(copy) == repr(client).replace(", progress=False", "")


def test_a_job_at_a_removed_engine_can_be_aborted(fleet: SimFleet, make_client: MakeClient) -> None:
    """Its requests there are still ours."""
    client = make_client(fleet[:2])
    job = client.start(prompts(4), params(30_000))
    eventually(lambda: sum(engine.state()["running"] for engine in fleet.engines) == 4, "all run")
    client.remove_engine(fleet[0])
    assert len(job.abort(5.0)) == 4
    assert {row["state"] for row in generations(fleet)} == {"aborted"}


def test_a_quarantined_engine_is_proven_idle_first(fleet: SimFleet, make_client: MakeClient) -> None:
    """Its aborts fail, so it may run something of ours: it is back only after abort_all and a proof."""
    engine = fleet.engines[0]
    client = make_client(fleet[:2])
    client.engines()
    engine.add_fault(Fault(kind="drop", seconds=0.02, times=1))
    engine.add_fault(Fault(kind="status", status=500, path="/abort_request", times=1))
    running = in_thread(lambda: client.generate(prompts(8), params(700)))
    eventually(lambda: client.engines()[0].state is EngineState.QUARANTINED, "quarantined")
    for sample, ids in zip(running.result(20.0), prompts(8), strict=True):
        check_sample(sample, ids, 700)
    eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
    assert engine.state()["aborts"]["abort_all"] >= 1
    assert engine.state()["running"] == 0


def test_versions_and_facts(fleet: SimFleet, make_client: MakeClient) -> None:
    """engines() tells what each engine said of itself."""
    client = make_client(fleet)
    client.generate(prompts(8), params(2))
    for status in client.engines():
        assert (status.version, status.dialect, status.state) == ("0.5.23", "sglang", EngineState.LIVE)
        assert (status.limit, status.in_flight, status.paused, status.dp_size) == (80, 0, False, 1)
        assert status.weight_version == "default"
