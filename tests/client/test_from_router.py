"""``from_router`` and ``refresh``: who is behind a router, and who is spoken to how."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rolloutsync import (
    ClientClosedError,
    EngineHTTPError,
    EngineState,
    EngineUnavailableError,
    MemberChanges,
    ProtocolError,
    RolloutClient,
    RolloutError,
    Status,
    Timeouts,
    UnsupportedError,
    WeightUpdateError,
    WrongServerError,
)
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, QUICK, SHORT, ScriptedEngine, calls, check_sample, good, params, prompts, quiet
from tests.client.router import FakeRouter, disaggregated, entries, newer, older
from tests.faults.kit import await_parting, unused_url
from tests.steps import in_turn
from tests.wire import Script, answer, eventually, silence

IMPATIENT = Timeouts(connect_s=2.0, control_s=2.0, sample_s=20.0, engine_wait_s=0.2)
Follow = Callable[..., RolloutClient]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Makes clients of a router, with short limits, which are closed after the test."""
    made: list[RolloutClient] = []

    def make(router: FakeRouter, **options: Any) -> RolloutClient:
        known = {"retry": QUICK, "timeouts": SHORT, "progress": False, **options}
        made.append(RolloutClient.from_router(router.url, **known))
        return made[-1]

    yield make
    for client in made:
        assert client.close() == []


def members(client: RolloutClient) -> list[str]:
    return [engine.url for engine in client.engines()]


def running(fleet: SimFleet) -> int:
    return sum(engine.state()["running"] for engine in fleet.engines)


# --- discovery ---


@pytest.mark.parametrize("lists", [newer, older])
def test_engines_are_spoken_to_directly(follow: Follow, fleet: SimFleet, lists: Callable[..., Script]) -> None:
    """Each of them, and the router is asked for its list alone."""
    with FakeRouter(entries(fleet.urls), lists=lists) as router:
        client, batch = follow(router), prompts(8)
        for sample in client.generate(batch, params(), n=2):
            check_sample(sample, batch[sample.index])
            assert sample.engine in fleet.urls
        assert client.abort_until_idle().idle
        assert members(client) == fleet.urls
        assert set(router.asked()) <= {"GET /workers", "GET /list_workers"}
    assert calls(fleet, "/generate") == 16


def test_ranks_are_not_dialled(follow: Follow, fleet: SimFleet) -> None:
    """Four entries, two engines."""
    urls = [f"{url}@{rank}" for rank in (1, 0) for url in fleet.urls[:2]]
    with FakeRouter(entries(urls)) as router:
        client = follow(router)
        assert {sample.status for sample in client.generate(prompts(4), params())} == {Status.TRUNCATED}
        assert members(client) == fleet.urls[:2]


def test_a_dead_worker_is_a_member_that_is_down(follow: Follow, fleet: SimFleet) -> None:
    """Whatever the router says of its health; it costs no sample, and it is dropped once."""
    dead = unused_url()
    with FakeRouter(entries([dead, *fleet.urls[:1]])) as router:
        client, batch = follow(router), prompts(4)
        for sample in client.generate(batch, params()):
            check_sample(sample, batch[sample.index])
        assert [engine.state for engine in client.engines()] == [EngineState.DOWN, EngineState.LIVE]
        assert client.abort_until_idle().idle
        assert client.refresh() == MemberChanges()
        router.workers = entries(fleet.urls[:1])
        assert client.refresh() == MemberChanges(removed=(dead,))
        assert not client.refresh()
        assert members(client) == fleet.urls[:1]


def test_a_router_that_has_no_workers_yet(follow: Follow, fleet: SimFleet) -> None:
    """It is waited for, and so is one that does not listen yet."""
    with FakeRouter() as router:
        router.server.refuse()
        made = in_thread(lambda: follow(router))
        router.server.reopen()
        eventually(lambda: len(router.asked()) > 1, "it was asked twice")
        router.workers = entries(fleet.urls)
        assert members(made.result(10.0)) == fleet.urls


def test_nobody_comes(follow: Follow) -> None:
    """After ``engine_wait_s``, with what was seen last."""
    with FakeRouter() as router, pytest.raises(EngineUnavailableError, match=r"0\.2 s: the router lists no workers"):
        follow(router, timeouts=IMPATIENT)
    with pytest.raises(EngineUnavailableError, match=r"no worker from the router within 0\.2 s") as told:
        follow(router, timeouts=IMPATIENT)
    assert told.value.engine == router.url


def test_an_engine_is_no_router(fleet: SimFleet) -> None:
    """Nor is a page that says something else, or a list that makes no sense."""
    with pytest.raises(WrongServerError, match=r"no router: give engines to RolloutClient\(urls\)"):
        RolloutClient.from_router(fleet[0])
    with (
        FakeRouter(lists=lambda *_: [answer(b"<html>")]) as router,
        pytest.raises(ProtocolError, match="not a router's list") as told,
    ):
        RolloutClient.from_router(router.url)
    assert told.value.engine == router.url


def test_a_router_given_by_mistake(make_client: Follow, fleet: SimFleet) -> None:
    """It is recognised by the first verb, which says what to do."""
    with FakeRouter(entries(fleet.urls)) as router:
        with pytest.raises(WrongServerError, match=r"is a router, not an engine: use RolloutClient\.from_router\("):
            make_client(router.url).generate(prompts(2), params())
        assert "POST /generate" not in router.asked()


@pytest.mark.parametrize(
    ("keys", "options"),
    [(["a"], {"admin_api_key": "a", "api_key": "k"}), (["k"], {"admin_api_key": "a", "api_key": "k"})],
)
def test_keys(follow: Follow, fleet: SimFleet, keys: list[str], options: dict[str, str]) -> None:
    """The admin key, and where the router does not take it the other."""
    with FakeRouter(entries(fleet.urls), keys=keys) as router:
        assert len(members(follow(router, **options))) == 4
        with pytest.raises(EngineHTTPError, match="GET /workers answered 401"):
            follow(router)


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [("nonsense", ValueError, "must start with http"), (["http://a"], TypeError, "must be a string")],
)
def test_bad_arguments(url: Any, kind: type[Exception], words: str) -> None:
    """As for any URL."""
    with pytest.raises(kind, match=words):
        RolloutClient.from_router(url)


# --- membership ---


def test_refresh_follows_the_router(follow: Follow, fleet: SimFleet) -> None:
    """New workers get requests, those that are gone finish what they have, and engines added by hand stay."""
    one, two, three, four = fleet.urls
    with FakeRouter(entries([one, two])) as router:
        client, batch = follow(router), prompts(8)
        client.add_engine(four)
        job = client.start(batch, params(300))
        eventually(lambda: all(fleet.engines[at].state()["running"] for at in (0, 1, 3)), "all three are busy")
        router.workers = entries([two, three])
        assert client.refresh() == MemberChanges(added=(three,), removed=(one,))
        for sample in job.result():
            check_sample(sample, batch[sample.index], 300)
            assert sample.attempts == 1
        eventually(lambda: members(client) == [two, four, three], "the removed one has left")
        engines = {sample.engine for sample in client.generate(prompts(12), params())}
        assert engines == {two, three, four}
        assert not client.refresh()


def test_an_empty_list_changes_nothing(follow: Follow, fleet: SimFleet) -> None:
    """A router that was just started has not registered anybody yet; one that is gone cannot be asked."""
    with FakeRouter(entries(fleet.urls)) as router:
        client = follow(router)
        router.workers = []
        with pytest.raises(EngineUnavailableError, match="lists no workers"):
            client.refresh()
    with pytest.raises(RolloutError, match="refused"):
        client.refresh()
    assert members(client) == fleet.urls
    assert len(client.generate(prompts(4), params())) == 4


def test_a_paused_engine_is_not_dropped(follow: Follow, fleet: SimFleet) -> None:
    """Its health check hangs while it is paused, so a router may lose sight of it; once it runs again it may go."""
    with FakeRouter(entries(fleet.urls[:2])) as router:
        client = follow(router)
        with client.quiesced():
            router.workers = entries(fleet.urls[1:2])
            assert client.refresh() == MemberChanges()
            assert members(client) == fleet.urls[:2]
        assert client.refresh() == MemberChanges(removed=(fleet[0],))


def test_a_fleet_that_is_rearranged(follow: Follow, fleet: SimFleet) -> None:
    """From regular to disaggregated: the same engines would have to be spoken to in another way."""
    with FakeRouter(entries(fleet.urls)) as router:
        client = follow(router)
        router.workers = disaggregated(fleet.urls)
        with pytest.raises(UnsupportedError, match="rearranged"):
            client.refresh()


def test_refresh_wants_a_router_and_an_open_client(make_client: Follow, follow: Follow, fleet: SimFleet) -> None:
    """By name."""
    with pytest.raises(RolloutError, match=r"make the client by RolloutClient\.from_router"):
        make_client(fleet.urls).refresh()
    with FakeRouter(entries(fleet.urls)) as router:
        client = follow(router)
        client.close()
        with pytest.raises(ClientClosedError):
            client.refresh()


@pytest.mark.parametrize("kind", [entries, disaggregated])
def test_pickles_and_children_know_the_router(follow: Follow, fleet: SimFleet, kind: Callable[..., list[Any]]) -> None:
    """The engines travel with the settings: the router is asked again by ``refresh`` alone."""
    with FakeRouter(kind(fleet.urls)) as router:
        client = follow(router)
        lists = router.asked().count("GET /workers")
        twin: RolloutClient = pickle.loads(pickle.dumps(client))
        with twin:
            assert {sample.error for sample in twin.generate(prompts(4), params())} == {None}
            assert router.asked().count("GET /workers") == lists
            assert not twin.refresh()
            assert members(twin) == fleet.urls
        client.engines()
        client.renew_in_child()
        assert {sample.error for sample in client.generate(prompts(4), params())} == {None}
        assert not client.refresh()
        assert len(router.sent) == (8 if kind is disaggregated else 0)


# --- disaggregated fleets ---


def test_generates_go_through_the_router(follow: Follow, fleet: SimFleet) -> None:
    """With a key for each group or session; nothing else goes there, and nobody else generates."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client, batch = follow(router), prompts(6)
        for sample in client.generate(batch, params(), n=4):
            check_sample(sample, batch[sample.index])
            assert sample.engine == router.url
        keys = router.keys()
        assert len(keys) == 6
        assert all(len(set(router.passed_on(key))) == 1 and len(router.passed_on(key)) == 4 for key in keys)
        client.generate(batch, params(), session_id="mine")
        assert len(router.passed_on("mine")) == 6
        assert calls(fleet, "/generate") == len(router.sent) == 30
        assert set(router.asked()) == {"GET /workers", "GET /health", "POST /generate"}
        assert client.engines()[0].limit == 1  # decoding limits how many run


def test_the_turns_of_an_episode_share_a_key(follow: Follow, fleet: SimFleet) -> None:
    """As they share an engine elsewhere."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router)

        def episode(turn: Any, item: list[int]) -> int:
            first = turn.generate(item, params(3))
            turn.generate([*item, *first.output_ids.tolist()], params(3))
            return 1

        assert [done.value for done in client.map(episode, prompts(5))] == [1] * 5
        keys = router.keys()
        assert [len(router.passed_on(key)) for key in keys] == [2] * 5


def test_what_the_router_drops_is_refused(follow: Follow, fleet: SimFleet) -> None:
    """Before anything is sent: of a call at once, of an item as its own error."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router)
        with pytest.raises(UnsupportedError, match=r"drops return_routed_experts without a word"):
            client.generate(prompts(2), params(), return_routed_experts=True)
        with pytest.raises(UnsupportedError, match=r"drops sampling_params\['logit_bias'\] without a word"):
            client.submit([3], params(logit_bias={"5": 1.0}))
        good, bad = client.generate([[3, 4], {"input_ids": [5], "mine": 1}], params(), on_error="return")
        check_sample(good, [3, 4])
        assert bad.status is Status.FAILED
        assert "drops mine without a word" in str(bad.error)
        assert len(router.sent) == 1


def test_a_newer_router_passes_routed_experts_on(follow: Follow) -> None:
    """So nothing is refused there but a few sampling parameters."""
    with ScriptedEngine() as engine, FakeRouter(entries([engine.url], "decode", runtime_type="sglang")) as router:
        client = follow(router)
        client.submit([3], params(), mine=1).result(10.0)
        assert [key for key, _ in router.sent] != [None]
        with pytest.raises(UnsupportedError, match=r"sampling_params\['stop_regex'\]"):
            client.submit([3], params(stop_regex="a"))


def test_a_drain_of_all_its_engines(follow: Follow, fleet: SimFleet) -> None:
    """Wherever the router has sent them; each engine is proven idle, and the samples are partials."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router)
        job = client.start(prompts(6), ENDLESS)
        eventually(lambda: running(fleet) == 6, "six are running")
        report = client.abort_until_idle()
        assert [engine.state.value for engine in report.engines] == ["Idle"] * 4
        assert running(fleet) == 0
        assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_a_job_is_aborted_wherever_it_runs(follow: Follow, fleet: SimFleet) -> None:
    """By its own ids, at every engine; what others sent there goes on."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router)
        other = client.start(prompts(2), params(300))
        with client.start(prompts(4), ENDLESS) as job:
            eventually(lambda: running(fleet) == 6, "all are running")
        assert {sample.status for sample in job.partials} == {Status.ABORTED}
        assert {sample.status for sample in other.result()} == {Status.TRUNCATED}
        assert client.audit().orphans == ()


@pytest.mark.slow
def test_weights_reach_all_and_a_stale_one_stops_all(follow: Follow, fleet: SimFleet) -> None:
    """The router would use it: no traffic until the next update."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router, timeouts=IMPATIENT)
        assert not client.update_weights_from_disk("new", "2").stale
        assert {sample.weight_spans[0].version for sample in client.generate(prompts(6), params())} == {"2"}
        fleet.engines[2].add_fault(Fault(kind="status", status=500, path="/update_weights_from_disk"))
        with pytest.raises(WeightUpdateError, match="1 of 4 engines"):
            client.update_weights_from_disk("new", "3")
        assert {engine.state for engine in client.engines()} == {EngineState.QUARANTINED}
        (sample,) = client.generate([[3]], params(), on_error="return")
        assert isinstance(sample.error, EngineUnavailableError)
        assert "behind the same router" in str(sample.error)
        fleet.engines[2].clear_faults()
        assert not client.update_weights_from_disk("new", "4").stale
        eventually(lambda: {e.state for e in client.engines()} == {EngineState.LIVE}, "all are back")
        assert {sample.weight_spans[0].version for sample in client.generate(prompts(6), params())} == {"4"}


@pytest.mark.slow
def test_an_engine_that_comes_back_with_old_weights_stops_all(follow: Follow, fleet: SimFleet) -> None:
    """Its answers say so; which engine they came from nobody knows, so each is asked, until all have an update."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router)
        client.update_weights_from_disk("new", "2")
        fleet.engines[2].call("POST", "/update_weight_version", {"new_version": "old", "abort_all_requests": False})
        told = {sample.weight_spans[0].version for sample in client.generate(prompts(3), params())}
        assert told == {"2", "old"}
        eventually(lambda: {e.state for e in client.engines()} == {EngineState.QUARANTINED}, "all are out of service")
        assert not client.update_weights_from_disk("new", "3").stale
        eventually(lambda: {e.state for e in client.engines()} == {EngineState.LIVE}, "all are back")


def test_the_router_dies_and_comes_back(follow: Follow, fleet: SimFleet) -> None:
    """Without it no engine is of use; its engines are back when it is."""
    with FakeRouter(disaggregated(fleet.urls)) as router:
        client = follow(router, timeouts=IMPATIENT)
        check_sample(client.generate([[3, 4]], params())[0], [3, 4])
        router.server.die()
        await_parting(router.server.port)  # a request on its way may still be served
        (sample,) = client.generate([[3, 4]], params(), on_error="return")
        assert isinstance(sample.error, EngineUnavailableError)
        assert router.url in str(sample.error)
        router.server.reopen()
        eventually(lambda: {e.state for e in client.engines()} == {EngineState.LIVE}, "all are back")
        check_sample(client.generate([[3, 4]], params())[0], [3, 4])


def test_an_engine_added_again_is_still_behind_the_router(follow: Follow, fleet: SimFleet) -> None:
    """By hand, after it was removed by hand: it must not be dialled."""
    with FakeRouter(disaggregated(fleet.urls[:2])) as router:
        client = follow(router)
        client.remove_engine(fleet[1])
        client.add_engine(fleet[1])
        assert {sample.engine for sample in client.generate(prompts(4), params())} == {router.url}


def test_a_dead_one_of_several_does_not_end_the_others(follow: Follow, fleet: SimFleet) -> None:
    """A drain in which it is gone leaves the partials of the others alone."""
    dead = unused_url()
    with FakeRouter(disaggregated([fleet[0], fleet[1], dead])) as router:
        client = follow(router, retry=QUICK)
        router.workers.pop()  # the router does not use it any more
        job = client.start(prompts(4), ENDLESS)
        eventually(lambda: running(fleet) == 4, "four are running")
        report = client.abort_until_idle()
        assert sorted(engine.state.value for engine in report.engines) == ["Gone", "Idle", "Idle"]
        assert all(len(sample.output_ids) for sample in job.result())
        assert client.refresh() == MemberChanges(removed=(dead,))


@pytest.mark.slow
def test_a_silent_engine_loses_all_that_went_to_the_router(follow: Follow) -> None:
    """Nobody knows which of them are there: whatever is in flight behind that router is sent again."""
    times = Timeouts(connect_s=2.0, control_s=2.0, sample_s=20.0, engine_wait_s=5.0, dead_s=0.6)
    hang: dict[str, Script] = {"/v1/loads": [silence]}
    with (
        FakeRouter() as router,
        ScriptedEngine(in_turn(quiet, quiet, good), others=hang) as sick,
        ScriptedEngine() as well,
    ):
        router.workers = entries([sick.url, well.url], "decode")
        client = follow(router, timeouts=times)
        client.engines()
        router.workers.pop()  # it sends everything to the sick one
        futures = [client.submit([3 + number], params()) for number in range(2)]
        assert [future.result(15.0).attempts for future in futures] == [2, 2]
        states = {engine.url: engine.state for engine in client.engines()}
        assert states == {sick.url: EngineState.QUARANTINED, well.url: EngineState.LIVE}
