"""A RolloutFleet on a local Ray: who makes what, what travels, drains and weights over all actors."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import requests

from rolloutsync import Status
from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import ENDLESS, ScriptedEngine, calls, check_sample, params, prompts
from tests.processes import await_true
from tests.ray.cluster import STORE_BYTES
from tests.ray.conftest import ROUTED, await_running, pid_of, running
from tests.ray.fleets import MakeFleet, fleets, homes, tasks, warm
from tests.ray.test_actor import in_object_store

if TYPE_CHECKING:
    from rolloutsync.ray_fleet import RolloutFleet

pytestmark = pytest.mark.ray

LIMIT = 8  # of each engine, below what it runs at once: so what it runs is what it has


@pytest.fixture(scope="module")
def both_fleets(cluster: ModuleType, deaf_engines: SimFleet) -> Iterator[dict[str, RolloutFleet]]:
    """For all tests that leave the actors alive; each engine in the hands of one actor, or all shared."""
    with fleets(deaf_engines.urls) as make:
        made = {
            "parted": make(engine_concurrency=LIMIT),
            "shared": make(engine_concurrency=LIMIT, share_engines=True),
        }
        for fleet in made.values():
            warm(fleet)
        yield made


@pytest.fixture
def before_the_guard(both_fleets: dict[str, RolloutFleet], shared_fleet: SimFleet) -> None:
    """Ray, the engines and two fleets outlive the test."""


@pytest.fixture(params=["parted", "shared"])
def both(request: pytest.FixtureRequest, both_fleets: dict[str, RolloutFleet], engines: SimFleet) -> RolloutFleet:
    return both_fleets[request.param]


@pytest.fixture
def parted(both_fleets: dict[str, RolloutFleet], engines: SimFleet) -> RolloutFleet:
    return both_fleets["parted"]


@pytest.fixture
def make_fleet(engines: SimFleet) -> Iterator[MakeFleet]:
    with fleets(engines.urls) as make:
        yield make


# --- who makes what ---


def test_a_batch_over_two_actors(both: RolloutFleet, engines: SimFleet) -> None:
    """Every sample comes, whole and in order; all engines work, none beyond its limit, by its own count."""
    batch = prompts(60)
    job = both.start(batch, params(100), n=2)
    await_true(lambda: min(tasks(both)) > 0, lambda: f"tasks at both actors: {both.dump()}")
    await_running(engines, 4 * LIMIT)
    samples = job.result()
    assert [(s.index, s.member) for s in samples] == [(index, member) for index in range(60) for member in range(2)]
    for sample in samples:
        check_sample(sample, batch[sample.index], 100)
    assert {s.engine for s in samples} == set(engines.urls)
    assert [engine.state()["peak_running"] for engine in engines.engines] == [LIMIT] * 4
    audit = both.audit()
    assert (audit.balanced, audit.open) == (True, ())


def test_groups_stay_together(parted: RolloutFleet, engines: SimFleet) -> None:
    """As long as there is room: the members of a prompt share an engine, for its prefix cache."""
    found = homes(parted.generate(prompts(8), params(50), n=4))
    assert [len(urls) for urls in found.values()] == [1] * 8
    assert set.union(*found.values()) == set(engines.urls)


def test_a_session_stays_at_its_engine(both: RolloutFleet) -> None:
    """``session_id`` is honoured over all actors."""
    samples = [s for at in range(6) for s in both.generate(prompts(2 + at % 2), params(4), session_id="one")]
    assert len({s.engine for s in samples}) == 1


def test_samples_as_they_finish(both: RolloutFleet) -> None:
    """The short ones arrive while the long ones run, and an abort touches its own job alone."""
    items = [{"input_ids": [5 + at], "sampling_params": ENDLESS if at == 0 else params(10)} for at in range(6)]
    with both.start(items) as job, both.start([[7, 8]], params(700)) as other:
        coming = iter(job)
        assert {next(coming).index for _ in range(5)} == {1, 2, 3, 4, 5}
        assert not job.done
        (partial,) = job.abort()
        assert (partial.index, partial.status) == (0, Status.ABORTED)
        check_sample(other.result()[0], [7, 8], 700)


def test_a_future_is_cancelled(parted: RolloutFleet, engines: SimFleet) -> None:
    future, other = parted.submit([3, 4], ENDLESS), parted.submit([5], params(20))
    check_sample(other.result(20), [5], 20)
    await_running(engines, 1)
    assert future.cancel()
    assert future.result(20).status is Status.ABORTED


def test_collect_judges_here(parted: RolloutFleet) -> None:
    """``accept`` and its closure run in this process; what was too much comes back as partials."""
    seen: list[int] = []

    def accept(group: list[Any]) -> bool:
        seen.append(group[0].index)
        return bool(group[0].index % 2)

    items = ({"input_ids": [5 + at], "sampling_params": params(10 if at < 4 else 30_000)} for at in range(1000))
    got = parted.collect(items, n=2, target=2, in_flight=6, accept=accept)
    assert [group[0].index for group in got.groups] == [1, 3]
    assert set(seen) >= {1, 3}
    assert {4, 5} <= {group[0].index for group in got.partials}


def test_episodes_run_here(parted: RolloutFleet) -> None:
    """Each turn is made by an actor, on one engine for all turns of an episode."""
    used: list[set[str | None]] = []

    def play(turn: Any, item: int) -> int:
        first = turn.generate([3 + item], params(4))
        second = turn.generate([*first.tokens.tolist(), 9], params(4))
        used.append({first.engine, second.engine})
        return item * item

    episodes = parted.map(play, range(12))
    assert [(e.status, e.value) for e in episodes] == [("COMPLETED", at * at) for at in range(12)]
    assert [len(urls) for urls in used] == [1] * 12


def test_arrays_arrive_without_a_copy(parted: RolloutFleet) -> None:
    """Large ones are read-only views into Ray's object store."""
    (sample,) = parted.generate([[5, 6]], params(300), return_routed_experts=True)
    check_sample(sample, [5, 6], 300)
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (len(sample.tokens) - 1, *ROUTED[:2])
    assert in_object_store(sample.routed_experts)
    for array in (sample.output_ids, sample.logprobs, sample.routed_experts):
        assert isinstance(array, np.ndarray)
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_more_than_the_object_store_holds(parted: RolloutFleet) -> None:
    """Samples that are kept, of 1.5 times its size, do not stop those that come."""
    samples = parted.generate([list(range(8000))], params(5), n=40, return_routed_experts=True)
    kept = [sample.routed_experts for sample in samples]
    assert sum(experts.nbytes for experts in kept if experts is not None) > 1.5 * STORE_BYTES
    for sample in samples:
        check_sample(sample, range(8000), 5)


def test_partials_go_on_at_another_actor(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """What one fleet was interrupted in, another goes on with, at other engines and with its experts whole."""
    first, second = make_fleet(engines.urls[:2]), make_fleet(engines.urls[2:])
    job = first.start(prompts(4), params(900), return_routed_experts=True)
    await_running(engines, 4)
    await_true(lambda: produced(engines) >= 200, "tokens of all four")
    first.abort_until_idle()
    partials = job.result()
    assert {s.status for s in partials} == {Status.ABORTED}
    assert min(len(s.output_ids) for s in partials) > 0
    for sample, before in zip(second.generate(partials), partials, strict=True):
        check_sample(sample, prompts(4)[sample.index], 900)
        assert sample.engine in engines.urls[2:]
        assert sample.attempts == 2
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(sample.tokens) - 1
        assert before.routed_experts is not None
        assert (sample.routed_experts[: len(before.routed_experts)] == before.routed_experts).all()


def produced(sim: SimFleet) -> int:
    return sum(engine.state()["tokens"] for engine in sim.engines)


# --- between steps ---


def test_a_drain_with_hundreds_in_flight(make_fleet: MakeFleet, engines: SimFleet) -> None:
    """Idle by the engines' own word when it returns; all partials are there at once, and the next batch runs."""
    fleet = make_fleet()
    warm(fleet)
    job = fleet.start(prompts(150), ENDLESS, n=2)
    await_running(engines, 300)
    report = fleet.abort_until_idle()
    assert report.idle
    assert running(engines) == 0
    assert job.wait(2.0)
    partials = job.result()
    assert [s.status for s in partials] == [Status.ABORTED] * 300
    assert sum(len(s.output_ids) > 0 for s in partials) >= 4 * 32
    again = fleet.generate(prompts(150), params(5))
    assert {s.status for s in again} == {Status.TRUNCATED}
    assert fleet.audit().balanced


def test_a_drain_ends_what_no_engine_has_yet(both: RolloutFleet, engines: SimFleet) -> None:
    """Also what waits in this process and in the actors."""
    job = both.start(prompts(100), ENDLESS)
    await_running(engines, 4 * LIMIT)
    assert both.abort_until_idle().idle
    samples = job.result()
    assert [s.status for s in samples] == [Status.ABORTED] * 100
    assert sum(engine.state()["started"] for engine in engines.engines) == 4 * LIMIT
    assert both.stats().waiting == 0


def test_nothing_leaves_while_it_is_quiet(both: RolloutFleet, engines: SimFleet) -> None:
    """A block of mode hold: samples stand still in it and go on after, those that wait are sent after it."""
    job = both.start(prompts(40), params(200))
    await_running(engines, 4 * LIMIT)
    with both.quiesced("hold"):
        before = calls(engines, "/generate")
        late = both.start(prompts(3), params(5))
        assert both.stats().gate == "hold"
        assert all(engine.state()["paused"] for engine in engines.engines)
        assert not late.wait(0.5)
        assert calls(engines, "/generate") == before
    assert {s.status for s in job.result() + late.result()} == {Status.TRUNCATED}


def test_pause_and_resume(both: RolloutFleet, engines: SimFleet) -> None:
    job = both.start(prompts(8), params(300))
    await_running(engines, 8)
    both.pause("in_place")
    assert [engine.state()["paused"] for engine in engines.engines] == [True] * 4
    late = both.start(prompts(2), params(5))
    assert not job.wait(0.8)  # they would have ended by now
    assert not late.done
    both.resume()
    for sample in job.result():
        check_sample(sample, prompts(8)[sample.index], 300)
    assert {s.status for s in late.result()} == {Status.TRUNCATED}


def test_memory_is_released_in_quiet(parted: RolloutFleet) -> None:
    with parted.quiesced():
        parted.release_memory(["kv_cache"])
        parted.resume_memory(["kv_cache"])
    parted.flush_cache()
    assert {s.status for s in parted.generate(prompts(8), params(5))} == {Status.TRUNCATED}


@pytest.mark.parametrize("shared", [False, True], ids=["parted", "shared"])
def test_weights_for_all(shared: bool, make_fleet: MakeFleet, engines: SimFleet) -> None:
    """One transaction over all actors: what ran is cut, what comes after is of the new weights, and says so."""
    both, version = make_fleet(share_engines=shared), f"new-{shared}"
    warm(both)
    job = both.start(prompts(8), params(900))
    await_running(engines, 8)
    both.update_weights_from_disk("new", version)
    assert both.weight_versions() == dict.fromkeys(engines.urls, version)
    partials = job.result()
    assert {s.status for s in partials} == {Status.ABORTED}
    for sample in both.generate(partials):
        assert [span.version for span in sample.weight_spans][-1] == version
    for sample in both.generate(prompts(8), params(5)):
        assert sample.output_ids.tolist() == expected_tokens(prompts(8)[sample.index], 5, version=version)
        assert [(span.version, span.start, span.end) for span in sample.weight_spans] == [(version, 0, 5)]


# --- arguments, and what travels ---


def test_the_users_session_and_key_reach_the_engines(cluster: ModuleType) -> None:
    """Through the actors too."""
    session = requests.Session()
    session.headers["X-Trainer"] = "seven"
    with ScriptedEngine() as one, ScriptedEngine() as two, fleets([one.url, two.url]) as make:
        fleet = make(session=session, api_key="secret")
        warm(fleet)
        assert {s.status for s in fleet.generate(prompts(8), params(2))} == {Status.TRUNCATED}
        for engine in (one, two):
            heads = [request.headers for request in engine.server.requests if request.path == "/generate"]
            assert {(head["x-trainer"], head["authorization"]) for head in heads} == {("seven", "Bearer secret")}
    assert dict(session.headers)["X-Trainer"] == "seven"


def test_metadata_that_does_not_pickle(parted: RolloutFleet) -> None:
    """They stay here, and come back with the samples."""
    lock = threading.Lock()
    batch = [{"input_ids": [5 + at], "metadata": {"lock": lock} if at == 3 else {"at": at}} for at in range(8)]
    samples = parted.generate(batch, params(5), n=2, on_error="return")
    assert [s.error for s in samples] == [None] * 16
    assert [s.metadata for s in samples] == [{"lock": lock} if s.index == 3 else {"at": s.index} for s in samples]
    assert [s.prompt.input_ids.tolist() for s in samples if s.prompt.input_ids is not None] == [
        [5 + s.index] for s in samples
    ]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"actors": 0}, "actors must be .*0"),
    ({"actors": 1.5}, "actors must be .*1.5"),
    ({"actors": 2, "actors_per_node": 1}, "actors=2 or actors_per_node=1, not both"),
    ({"actors_per_node": -1}, "actors_per_node must be .*-1"),
    ({"share_engines": "yes"}, "share_engines must be .*'yes'"),
    ({"actor_wait_s": -1}, "actor_wait_s must be .*-1"),
    ({"actor_options": 5}, "actor_options must be .*5"),
    ({"actor_options": {"bogus": 1}}, "bogus"),
    ({"actor_options": {"num_cpus": -1}}, "num_cpus"),
    ({"engine_concurrency": 0}, "engine_concurrency must be .*0"),
    ({"urls": []}, "urls"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[str(options) for options, _ in BAD])
def test_a_bad_argument_is_named(options: dict[str, Any], words: str, cluster: ModuleType) -> None:
    """By the constructor, before any actor is made."""
    from rolloutsync.ray_fleet import RolloutFleet

    with pytest.raises((ValueError, TypeError), match=words):
        RolloutFleet(**{"urls": "http://127.0.0.1:1", **options})


def test_a_name_for_two_actors_leaves_none(cluster: ModuleType, make_fleet: MakeFleet) -> None:
    """Ray refuses the second, and the first is not left behind."""
    fleet = make_fleet(actor_options={"name": "taken"})
    with pytest.raises(ValueError, match="taken"):
        fleet.generate([[3]], params(1))
    assert fleet.actors == []
    await_true(lambda: not named(cluster, "taken"), "the end of the first actor")


def named(ray: ModuleType, name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def test_a_fleet_does_not_pickle(parted: RolloutFleet) -> None:
    with pytest.raises(TypeError, match="RolloutFleet does not pickle"):
        pickle.dumps(parted)


def test_shares_of_the_engines(cluster: ModuleType) -> None:
    """Even, none empty, and near as far as that goes."""
    from rolloutsync.ray_fleet import partition

    def urls(**counts: int) -> list[str]:
        return [f"http://{host}:{number}" for host, count in counts.items() for number in range(count)]

    assert partition(urls(a=3, b=3), ["b", "a"]) == [urls(b=3), urls(a=3)]
    assert partition(urls(a=2), ["a", "b"]) == [["http://a:0"], ["http://a:1"]]
    assert partition(urls(c=5), ["", ""]) == [["http://c:0", "http://c:2", "http://c:4"], ["http://c:1", "http://c:3"]]
    assert [len(part) for part in partition(urls(a=12, b=4), ["a", "b"])] == [8, 8]
    assert min(len(part) for part in partition(urls(a=2, b=2, c=1), ["a", "b", "c", "d"])) == 1


def test_the_handles_are_there(cluster: ModuleType, parted: RolloutFleet) -> None:
    """For whoever wants more of Ray than this; ``dump`` says where each actor is."""
    found = [pid_of(cluster, actor) for actor in parted.actors]
    assert len(set(found)) == 2
    told = parted.dump()
    assert all(f"pid {pid})" in told for pid in found)
    assert repr(parted).startswith("RolloutFleet(['http://127.0.0.1:")
