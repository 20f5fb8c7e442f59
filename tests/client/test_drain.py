"""abort_until_idle: what it aborts, what it proves, what it leaves alone, and that it always ends."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from rolloutsync import IdleState, NotIdleError, RolloutClient, Status, Timeouts
from rolloutsync.clock import Clock
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, ScriptedEngine, calls, check_sample, generations, params, prompts
from tests.wire import answer, eventually, silence

MakeClient = Callable[..., RolloutClient]
CLOCK = Clock()


def running(fleet: SimFleet) -> int:
    return sum(engine.state()["running"] for engine in fleet.engines)


def state_sum(fleet: SimFleet, key: str) -> int:
    return sum(engine.state()["aborts"][key] for engine in fleet.engines)


def test_partials_are_delivered_and_the_gate_opens_again(fleet: SimFleet, make_client: MakeClient) -> None:
    """Running samples come back with their tokens; the next batch is served as ever."""
    client = make_client(fleet)
    job = client.start(prompts(12), ENDLESS)
    eventually(lambda: running(fleet) == 12 and all(row["tokens"] for row in generations(fleet)), "all run")
    report = client.abort_until_idle(10.0)
    assert report.idle
    assert [drain.state for drain in report.engines] == [IdleState.IDLE] * 4
    assert "4 engines, idle after" in str(report)
    for sample in job.result():
        assert sample.status is Status.ABORTED
        assert len(sample.output_ids) > 0
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.output_ids)
        assert sample.error is None
    assert running(fleet) == 0
    assert client.stats().gate == "open"
    check_sample(client.generate([[5]], params(4))[0], [5], 4)


def test_what_waits_ends_unsent(fleet: SimFleet, make_client: MakeClient) -> None:
    """Samples without an engine end ABORTED; none slips through while the drain runs."""
    client = make_client(fleet[0], engine_concurrency=2)
    job = client.start(prompts(20), ENDLESS)
    eventually(lambda: running(fleet) == 2, "two run")
    client.abort_until_idle(10.0)
    samples = job.result()
    assert Counter(sample.attempts for sample in samples) == {0: 18, 1: 2}
    assert {sample.status for sample in samples} == {Status.ABORTED}
    assert calls(fleet, "/generate") == 2


def test_an_idle_engine_gets_no_abort(fleet: SimFleet, make_client: MakeClient) -> None:
    """Some versions die of it (B19); the proof still takes two readings."""
    report = make_client(fleet).abort_until_idle(10.0)
    assert report.idle
    assert state_sum(fleet, "count") == 0
    assert all(drain.sweeps >= 2 and drain.aborts == 0 for drain in report.engines)
    assert report.seconds < 2.0


def test_everything_on_the_engine_is_aborted(fleet: SimFleet, make_client: MakeClient) -> None:
    """Running, queued and in prefill, whoever sent it."""
    with SimFleet(engines=1, max_running_requests=2, prefill_tokens_per_second=5000.0) as small:
        other, client = make_client(small, engine_concurrency=8), make_client(small)
        foreign = other.start([*prompts(6), list(range(3, 20_000))], params(10_000))
        eventually(lambda: small.engines[0].state()["live"] == 7, "they are there")
        report = client.abort_until_idle(10.0)
        assert report.engines[0].state is IdleState.IDLE
        assert small.engines[0].state()["aborts"]["abort_all"] >= 1
        other.abort_until_idle(10.0)
        assert {sample.status for sample in foreign.result()} == {Status.ABORTED}


def test_a_request_in_prefill_is_not_taken_for_idle(make_client: MakeClient) -> None:
    """It is in no queue and shows only in the token counts; it is aborted all the same."""
    with SimFleet(engines=1, prefill_tokens_per_second=8000.0) as fleet:
        client = make_client(fleet)
        job = client.start([list(range(3, 30_000))], params(100))
        eventually(lambda: fleet.engines[0].state()["in_flight"] == 1, "it is being read")
        report = client.abort_until_idle(10.0)
        assert report.idle
        assert job.result()[0].status is Status.ABORTED
        assert fleet.engines[0].state()["in_flight"] == 0


def test_scope_own_leaves_others_alone(fleet: SimFleet, make_client: MakeClient) -> None:
    """No abort_all; the other client's samples are what they would have been."""
    mine, other = make_client(fleet), make_client(fleet)
    theirs, ours = other.start(prompts(6), params(800)), mine.start(prompts(6), ENDLESS)
    eventually(lambda: running(fleet) == 12, "all run")
    report = mine.abort_until_idle(10.0, scope="own")
    assert (report.scope, report.idle) == ("own", True)
    assert {sample.status for sample in ours.result()} == {Status.ABORTED}
    for sample, ids in zip(theirs.result(), prompts(6), strict=True):
        check_sample(sample, ids, 800)
    assert state_sum(fleet, "abort_all") == 0


def test_calls_that_overlap_are_one_drain(fleet: SimFleet, make_client: MakeClient) -> None:
    """B19: eight threads do not multiply the traffic; all get the same proof."""
    client = make_client(fleet)
    job = client.start(prompts(16), ENDLESS)
    eventually(lambda: running(fleet) == 16, "all run")
    barrier = threading.Barrier(8)

    def drain() -> bool:
        barrier.wait()
        return client.abort_until_idle(10.0).idle

    assert [future.result(15.0) for future in [in_thread(drain) for _ in range(8)]] == [True] * 8
    job.result()
    assert max(engine.state()["aborts"]["abort_all"] for engine in fleet.engines) <= 2


def test_a_short_timeout_is_kept_beside_a_long_drain(fleet: SimFleet, make_client: MakeClient) -> None:
    """One who joins another's drain still returns within its own time; a patient one is not sent away early."""
    client = make_client(fleet[0])
    client.engines()
    number = fleet.engines[0].add_fault(Fault(kind="stuck_load"))
    patient = in_thread(lambda: client.abort_until_idle(15.0))
    eventually(lambda: calls(fleet, "/v1/loads") > 0, "the first drain runs")
    began = CLOCK.monotonic()
    with pytest.raises(NotIdleError) as caught:
        client.abort_until_idle(0.5)
    assert CLOCK.monotonic() - began < 1.5
    assert fleet[0] in str(caught.value)
    fleet.engines[0].clear_faults(number)
    assert patient.result(10.0).idle


def test_a_patient_drain_outlives_a_short_one(fleet: SimFleet, make_client: MakeClient) -> None:
    """The other way round: the short one gives up, the long one that joined it goes on until the engine is idle."""
    client = make_client(fleet[0])
    client.engines()
    number = fleet.engines[0].add_fault(Fault(kind="stuck_load"))
    short = in_thread(lambda: client.abort_until_idle(1.0, raise_on_timeout=False))
    eventually(lambda: calls(fleet, "/v1/loads") > 0, "the first drain runs")
    patient = in_thread(lambda: client.abort_until_idle(15.0))
    assert not short.result(5.0).idle
    fleet.engines[0].clear_faults(number)
    assert patient.result(10.0).idle


def test_an_unreadable_load_is_never_idle(make_client: MakeClient) -> None:
    """Nothing that is not certainly zero is zero."""
    loads = [b"{}", b'{"error": "x"}', b"null", b'"7"', b"-1", b'{"loads": []}', b"<html>"]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine(others={"/v1/loads": [answer(body)]})) for body in loads]
        client = make_client([engine.url for engine in engines])
        report = client.abort_until_idle(0.4, raise_on_timeout=False)
        assert [drain.state for drain in report.engines] == [IdleState.UNKNOWN] * 7
        assert all(drain.detail for drain in report.engines)
        assert not report.idle


def test_a_silent_engine_that_was_never_known(make_client: MakeClient) -> None:
    """The first verb of a client is a drain, and the engine says nothing at all: still in time."""
    with ScriptedEngine(others={path: [silence] for path in ("/server_info", "/model_info", "/v1/loads")}) as engine:
        client = make_client(engine.url, timeouts=Timeouts())
        began = CLOCK.monotonic()
        with pytest.raises(NotIdleError):
            client.abort_until_idle(1.1)
        assert CLOCK.monotonic() - began < 2.1


def test_an_engine_that_is_gone(make_client: MakeClient, fleet: SimFleet) -> None:
    """It is reported and fails nothing: nothing can be running there."""
    with SimFleet(engines=1) as lost:
        client = make_client([lost[0], fleet[0]])
        client.generate([[5]], params(2))
        lost.engines[0].kill()
        report = client.abort_until_idle(10.0)
        assert report.idle
        assert [drain.state for drain in report.engines] == [IdleState.GONE, IdleState.IDLE]


def test_keep_closed(fleet: SimFleet, make_client: MakeClient) -> None:
    """Requests wait until resume(); their deadline stands still meanwhile."""
    client = make_client(fleet)
    client.engines()
    client.abort_until_idle(10.0, keep_closed=True)
    assert client.stats().gate == "hold"
    waiting = in_thread(lambda: client.generate([[5]], params(4), timeout=0.3))
    eventually(lambda: client.stats().open == 1, "it waits")
    until = CLOCK.monotonic() + 0.5
    eventually(lambda: CLOCK.monotonic() > until, "longer than its timeout")
    assert calls(fleet, "/generate") == 0
    client.resume()
    check_sample(waiting.result(5.0)[0], [5], 4)


def test_a_drain_while_we_hold_it_paused(fleet: SimFleet, make_client: MakeClient) -> None:
    """Our own pause is ended first, or the engine would answer no abort; the gate stays with the pauser."""
    client = make_client(fleet)
    job = client.start(prompts(4), ENDLESS)
    eventually(lambda: running(fleet) == 4, "all run")
    client.pause("in_place")
    assert client.abort_until_idle(10.0).idle
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    assert not any(engine.state()["paused"] for engine in fleet.engines)
    client.resume()
    check_sample(client.generate([[5]], params(4))[0], [5], 4)


@pytest.mark.slow
def test_a_foreign_pause_is_frozen_not_idle(make_client: MakeClient) -> None:
    """Somebody else paused the engine: its load stands still, which proves nothing."""
    with SimFleet(engines=1, tokens_per_second=500.0) as fleet:
        client = make_client(fleet)
        client.engines()
        fleet.engines[0].call("POST", "/pause_generation", {"mode": "in_place"})
        report = client.abort_until_idle(6.5, raise_on_timeout=False)
        assert (report.idle, report.engines[0].state) == (False, IdleState.FROZEN)
