"""A RolloutActor on a local Ray: what blocks whom, what travels how, and what is left when it ends."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rolloutsync import (
    BatchError,
    ClientClosedError,
    Collected,
    CollectError,
    ControlError,
    DrainReport,
    EngineHTTPError,
    EpisodeError,
    NotIdleError,
    RolloutClient,
    RolloutError,
    Stats,
    Status,
    TransportError,
)
from rolloutsync.errors import Cut, Phase
from rolloutsync.sim import SimFleet
from tests.client.kit import ENDLESS, check_sample, params, prompts
from tests.processes import alive, await_true
from tests.ray.conftest import OPTIONS, ROUTED, MakeActor, await_idle, await_running, pid_of

pytestmark = pytest.mark.ray

AT_ONCE_S = 1.0


def quickly(ray: ModuleType, *refs: Any) -> Any:
    """The answers, which must come at once."""
    answers = ray.get(list(refs), timeout=AT_ONCE_S)
    return answers[0] if len(refs) == 1 else answers


# --- who waits for whom ---


def test_two_callers_at_once(cluster: ModuleType, actor: Any) -> None:
    """The driver and a task share one actor; each gets its own samples, whole and in order."""

    @cluster.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def caller(actor: Any, batch: list[list[int]]) -> Any:
        import ray

        return ray.get(actor.generate.remote(batch, params(200), n=2))

    mine, theirs = prompts(4), prompts(4, length=9)
    refs = [caller.remote(actor, theirs), actor.generate.remote(mine, params(200), n=2)]
    for batch, samples in zip((theirs, mine), cluster.get(refs), strict=True):
        assert [(s.index, s.member) for s in samples] == [(i, m) for i in range(4) for m in range(2)]
        for sample in samples:
            check_sample(sample, batch[sample.index], 200)


def test_an_abort_during_a_generate(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """The driver's abort proves the engines idle, and the generate that ran returns its partials."""
    ref = actor.generate.remote(prompts(4), ENDLESS, n=2)
    await_running(fleet, 8)
    report = cluster.get(actor.abort_until_idle.remote(30))
    assert isinstance(report, DrainReport)
    assert report.idle
    samples = cluster.get(ref, timeout=AT_ONCE_S)
    assert [s.status for s in samples] == [Status.ABORTED] * 8
    assert all(s.error is None for s in samples)
    assert any(len(s.output_ids) for s in samples)


def test_a_collect_and_its_partials(cluster: ModuleType, actor: Any) -> None:
    """``accept`` travels into the actor; groups come back, and go on in the next call."""
    items = [{"input_ids": [5 + at], "sampling_params": params(10 if at < 4 else 30_000)} for at in range(6)]
    got = cluster.get(actor.collect.remote(items, n=2, target=2, in_flight=6, accept=lambda group: group[0].index % 2))
    assert isinstance(got, Collected)
    assert [group[0].index for group in got.groups] == [1, 3]
    assert {4, 5} <= {group[0].index for group in got.partials}
    ref = actor.collect.remote(got.partials, n=2, target=1, timeout=0.5)
    again = cluster.get(ref)
    assert (again.ended, again.complete) == ("timeout", False)
    assert len(again.partials[-1][0].output_ids) > len(got.partials[-1][0].output_ids)
    with pytest.raises(CollectError, match="ZeroDivisionError") as caught:
        cluster.get(actor.collect.remote(items[:2], n=2, target=1, accept=lambda _: 1 // 0))
    assert sum(caught.value.counts.values()) == 2


def test_episodes_run_in_the_actor(cluster: ModuleType, actor: Any) -> None:
    """The function travels there and its episodes back; an error that cannot pickle arrives as its words."""

    def play(turn: Any, item: int) -> int:
        import threading

        answer = turn.generate([3 + item])
        turn.generate([*answer.tokens.tolist(), 9])
        if item == 2:
            raise ValueError(threading.Lock())
        return item * item

    results = cluster.get(actor.map.remote(play, [0, 1, 2], sampling_params=params(4)))
    assert [(episode.status, episode.value) for episode in results[:2]] == [("COMPLETED", 0), ("COMPLETED", 1)]
    assert "ValueError: <unlocked" in str(results[2].error)
    assert [int(episode.transcript.segments[0].loss_mask.sum()) for episode in results] == [8, 8, 8]
    with pytest.raises(EpisodeError) as caught:
        cluster.get(actor.map.remote(lambda turn, item: 1 // 0, [0, 1]))
    assert caught.value.counts == {"FAILED": 2}


def test_control_calls_do_not_wait(cluster: ModuleType, make_actor: MakeActor, fleet: SimFleet) -> None:
    """Four generates block, one of them in Ray's own queue, and every other verb answers in less than a second."""
    actor = make_actor(max_concurrency=3)
    refs = [actor.generate.remote(prompts(2), ENDLESS) for _ in range(4)]
    await_running(fleet, 6)
    stats = quickly(cluster, actor.stats.remote())
    assert isinstance(stats, Stats)
    assert (stats.admitted, stats.open) == (6, 6)
    assert [engine.in_flight for engine in quickly(cluster, actor.engines.remote())] == [3, 3]
    loads = quickly(cluster, actor.loads.remote())
    assert sum(load.running for load in loads.values()) == 6
    assert set(quickly(cluster, actor.control.remote("/model_info", method="GET"))) == set(fleet.urls)
    quickly(cluster, actor.pause.remote("in_place"))
    assert quickly(cluster, actor.stats.remote()).gate == "hold"
    quickly(cluster, actor.resume.remote())
    await_true(lambda: aborted(cluster, actor, refs), "the end of all four")
    for ref in refs:
        assert [s.status for s in cluster.get(ref)] == [Status.ABORTED] * 2


def aborted(ray: ModuleType, actor: Any, refs: list[Any]) -> bool:
    """Abort once more; whether every call has ended. (One from Ray's queue may start just after an abort.)"""
    assert ray.get(actor.abort_until_idle.remote(30)).idle
    _, left = ray.wait(refs, num_returns=len(refs), timeout=0.2)
    return not left


def test_a_look_does_not_wait_behind_control_calls(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """As many slow control calls as there are threads for them, and the counts are still to be had."""
    quickly(cluster, actor.engines.remote())
    for engine in fleet.engines:
        engine.freeze()
    try:
        stuck = [actor.control.remote("/model_info", method="GET") for _ in range(9)]
        assert quickly(cluster, actor.stats.remote()).open == 0
    finally:
        for engine in fleet.engines:
            engine.thaw()
    assert all(set(answer) == set(fleet.urls) for answer in cluster.get(stuck))


def test_audit_and_dump_while_a_generate_blocks(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """Who waits for what, asked from outside."""
    ref = actor.generate.remote(prompts(2), ENDLESS)
    await_running(fleet, 2)
    audit, dump = quickly(cluster, actor.audit.remote(), actor.dump.remote())
    assert {(sample.index, sample.member) for sample in audit.open} == {(0, 0), (1, 0)}
    assert {sample.engine for sample in audit.open} <= set(fleet.urls)
    assert all(str(sample.rid) in dump for sample in audit.open)
    cluster.get(actor.abort_until_idle.remote(30))
    cluster.get(ref)


def test_engines_come_and_go(cluster: ModuleType, make_actor: MakeActor, fleet: SimFleet) -> None:
    actor = make_actor(urls=fleet.urls[0])
    cluster.get(actor.add_engine.remote(fleet.urls[1]))
    cluster.get(actor.remove_engine.remote(fleet.urls[0]))
    samples = cluster.get(actor.generate.remote(prompts(4), params(4)))
    assert {s.engine for s in samples} == {fleet.urls[1]}
    cluster.get([actor.flush_cache.remote(), actor.abort_until_idle.remote(30, keep_closed=True)])
    cluster.get(actor.release_memory.remote(["kv_cache"]))
    cluster.get(actor.resume_memory.remote(["kv_cache"]))
    cluster.get(actor.resume.remote())


# --- what travels ---


def test_errors_arrive_as_their_own_type(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """Whoever catches our class catches it from ``ray.get`` too, and finds what the original carried."""
    with pytest.raises(BatchError) as batch:
        cluster.get(actor.generate.remote([[5] * 200_000], params(4), on_error="raise"))
    assert batch.value.counts == {"FAILED": 1}
    (sample,) = batch.value.samples
    assert isinstance(sample.error, EngineHTTPError)
    assert sample.error.status == 400
    assert isinstance(batch.value, cluster.exceptions.RayTaskError)
    with pytest.raises(ControlError) as control:
        cluster.get(actor.control.remote("/no_such_path"))
    assert set(control.value.errors) == set(fleet.urls)
    assert {error.status for error in control.value.errors.values() if isinstance(error, EngineHTTPError)} == {404}
    with pytest.raises(ValueError, match="scope must be one of"):
        cluster.get(actor.abort_until_idle.remote(scope="everything"))


def test_every_attribute_of_an_error_arrives(cluster: ModuleType) -> None:
    """Also those that have a default: Ray's class of two parents must not answer with that."""
    made = [
        EngineHTTPError("no", engine="http://e", rid="r", attempts=3, status=503, retry_after="1", paused=True),
        TransportError("broke", engine="http://e", phase=Phase.BODY, cut=Cut.DEADLINE),
        NotIdleError("busy", report="a report"),
    ]

    @cluster.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def fail(error: RolloutError) -> None:
        raise error

    for error in made:
        with pytest.raises(type(error)) as caught:
            cluster.get(fail.remote(error))
        arrived: Any = caught.value
        assert arrived.message == arrived.cause.message == error.message
        assert {name: getattr(arrived, name) for name in vars(error)} == vars(error)


def test_a_wrong_client_option_is_told_by_the_first_call(cluster: ModuleType) -> None:
    from rolloutsync.ray_actor import RolloutActor

    actor = RolloutActor.options(num_cpus=0).remote("http://127.0.0.1:1", engine_concurrency=0)
    with pytest.raises(cluster.exceptions.ActorDiedError, match="engine_concurrency"):
        cluster.get(actor.stats.remote())


def test_arrays_arrive_without_a_copy(cluster: ModuleType, actor: Any) -> None:
    """Each array is a read-only view into Ray's object store, mapped once for whoever gets it in this process."""
    batch = prompts(2)
    ref = actor.generate.remote(batch, params(300), return_routed_experts=True)
    for sample, other in zip(cluster.get(ref), cluster.get(ref), strict=True):
        check_sample(sample, batch[sample.index], 300)
        assert sample.routed_experts.shape == (len(sample.tokens) - 1, *ROUTED[:2])
        for name in ("output_ids", "logprobs", "routed_experts"):
            array, twin = getattr(sample, name), getattr(other, name)
            assert not array.flags.owndata
            assert not array.flags.writeable
            assert np.shares_memory(array, twin)
            assert in_object_store(array)


def in_object_store(array: Any) -> bool:
    """Whether the array's memory is a mapping of Ray's shared memory."""
    at = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *name = line.split()
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= at and at + array.nbytes <= end:
            return bool(name) and name[0].startswith("/dev/shm/plasma")
    return False


def test_a_sample_pickles_its_arrays_out_of_band(fleet: SimFleet) -> None:
    """With protocol 5 the arrays travel beside the pickle, and come back as views of what travelled."""
    with RolloutClient(fleet.urls, **OPTIONS) as client:
        (sample,) = client.generate([[1, 2, 3]], params(64))
    assert sample.logprobs is not None
    assert sample.output_ids.flags.owndata
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(sample, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(data, buffers=buffers)
    assert np.shares_memory(back.output_ids, sample.output_ids)
    assert np.shares_memory(back.logprobs, sample.logprobs)


def test_partials_go_through_the_object_store_and_back(cluster: ModuleType, actor: Any) -> None:
    """Samples that were put there, read-only as they are, are a batch like any other."""
    ids = cluster.put([np.arange(3, 9, dtype=np.int64)])
    ref = actor.generate.remote(ids, params(8))
    (first,) = cluster.get(ref)
    check_sample(first, range(3, 9), 8)
    (same,) = cluster.get(actor.generate.remote(ref, params(8)))
    assert same.rid == first.rid


def test_a_client_pickles_into_a_task(cluster: ModuleType, fleet: SimFleet) -> None:
    """Settings travel; the task opens sockets of its own."""

    @cluster.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def task(client: RolloutClient) -> Any:
        with client:
            return client.generate([[3, 4, 5]], {"max_new_tokens": 8, "ignore_eos": True})

    with RolloutClient(fleet.urls, **OPTIONS) as client:
        mine = client.generate([[3, 4, 5]], params(8))
        (theirs,) = cluster.get(task.remote(client))
    assert theirs.output_ids.tolist() == mine[0].output_ids.tolist()


# --- named, subclassed ---


def test_found_by_its_name(cluster: ModuleType, make_actor: MakeActor) -> None:
    make_actor(name="rollout")
    found = cluster.get_actor("rollout")
    (sample,) = cluster.get(found.generate.remote([[3, 4]], params(4)))
    check_sample(sample, [3, 4], 4)


def test_a_subclass_with_verbs_of_its_own(cluster: ModuleType, make_actor: MakeActor, fleet: SimFleet) -> None:
    """What a trainer adds runs beside the client, and the inherited verbs keep their groups."""
    from rolloutsync.ray_actor import CONCURRENCY_GROUPS, RolloutWorker

    class Scoring(RolloutWorker):
        def generate_and_score(self, batch: Any) -> list[float]:
            return [float(len(s.output_ids)) for s in self.generate(batch, {"max_new_tokens": 5, "ignore_eos": True})]

    actor = make_actor(cluster.remote(concurrency_groups=CONCURRENCY_GROUPS)(Scoring))  # one thread for generates
    assert cluster.get(actor.generate_and_score.remote([[3, 4], [5]])) == [5.0, 5.0]
    ref = actor.generate.remote([[3, 4]], ENDLESS)
    await_running(fleet, 1)
    assert quickly(cluster, actor.stats.remote()).open == 1
    cluster.get(actor.abort_until_idle.remote(30))
    assert cluster.get(ref)[0].status is Status.ABORTED


# --- how it ends ---


def test_a_cancelled_generate_aborts_its_own_requests(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """``ray.cancel`` ends one call; another one on the same actor runs on."""
    kept = actor.generate.remote(prompts(1), ENDLESS)
    ref = actor.generate.remote(prompts(2), ENDLESS)
    await_running(fleet, 3)
    cluster.cancel(ref)
    with pytest.raises(cluster.exceptions.TaskCancelledError):
        cluster.get(ref)
    await_running(fleet, 1)
    cluster.get(actor.abort_until_idle.remote(30))
    assert [s.status for s in cluster.get(kept)] == [Status.ABORTED]


def test_a_killed_actor_leaves_idle_engines(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """Nobody says goodbye: the kernel closes the sockets, and on that the engines abort."""
    ref = actor.generate.remote(prompts(4), ENDLESS)
    pid = pid_of(cluster, actor)
    await_running(fleet, 4)
    cluster.kill(actor)
    with pytest.raises(cluster.exceptions.RayActorError):
        cluster.get(ref)
    await_true(lambda: not alive(pid), "the end of the process")
    await_idle(fleet)


def test_a_closed_actor_gives_back_its_partials_and_ends(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """``close``, then ``__ray_terminate__``: an orderly end in the middle of a generate."""
    ref = actor.generate.remote(prompts(4), ENDLESS)
    pid = pid_of(cluster, actor)
    await_running(fleet, 4)
    assert cluster.get(actor.close.remote()) == []
    assert [s.status for s in cluster.get(ref)] == [Status.ABORTED] * 4
    with pytest.raises(ClientClosedError):
        cluster.get(actor.generate.remote(prompts(1), ENDLESS))
    actor.__ray_terminate__.remote()
    await_true(lambda: not alive(pid), "the end of the process")


def test_a_terminated_actor_finishes_what_runs(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """``__ray_terminate__`` alone waits for the calls that run, and their answers arrive."""
    ref = actor.generate.remote(prompts(2), params(800))
    pid = pid_of(cluster, actor)
    await_running(fleet, 2)
    actor.__ray_terminate__.remote()
    for sample in cluster.get(ref):
        check_sample(sample, prompts(2)[sample.index], 800)
    await_true(lambda: not alive(pid), "the end of the process")
