"""Engines that die, freeze or go silent while samples wait on them, and those that only seem to."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from rolloutsync import EngineState, RolloutClient, Status, Timeouts
from rolloutsync.sim import Fault, SimFleet
from tests.client.conftest import MakeClient
from tests.client.kit import ENDLESS, ScriptedEngine, check_sample, params, prompts, quiet
from tests.wire import answer, eventually, reset, silence

DEAD_S = 1.2
WATCHFUL = Timeouts(connect_s=2.0, control_s=1.0, sample_s=30.0, engine_wait_s=5.0, dead_s=DEAD_S)


@pytest.fixture
def pair() -> Iterator[SimFleet]:
    """Two engines of our own, to be frozen."""
    with SimFleet(engines=2, tokens_per_second=1000.0, disconnect_poll_s=0.2) as fleet:
        yield fleet


def states(client: RolloutClient) -> list[EngineState]:
    return [engine.state for engine in client.engines()]


def freeze_scheduler(fleet: SimFleet) -> Callable[[], object]:
    fleet.engines[0].add_fault(Fault(kind="freeze", times=None))
    return fleet.engines[0].clear_faults


def stop_process(fleet: SimFleet) -> Callable[[], object]:
    pid = fleet.engines[0].pid
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [freeze_scheduler, stop_process])
def test_a_frozen_engine_loses_its_samples_to_the_other(
    pair: SimFleet,
    make_client: MakeClient,
    warnings: Callable[[], list[str]],
    stop: Callable[[SimFleet], Callable[[], object]],
) -> None:
    """Frozen with requests on it: they are made elsewhere, it is quarantined, and comes back when it is well."""
    client = make_client(pair, timeouts=WATCHFUL)
    client.engines()
    job = client.start(prompts(8), params(400))
    eventually(lambda: all(engine.state()["running"] == 4 for engine in pair.engines), "both have four")
    thaw = stop(pair)
    try:
        for sample, ids in zip(job.result(), prompts(8), strict=True):
            check_sample(sample, ids, 400)
            assert sample.attempts == (1 if sample.engine == pair.urls[1] and sample.timing.total_s < DEAD_S else 2)
        assert client.audit().balanced
        first = client.engines()[0]
        assert first.state is EngineState.QUARANTINED
        assert "for 1 s" in first.reason
        assert len(client.audit().orphans) == 4
        assert len(warnings()) == 1
    finally:
        thaw()
    eventually(lambda: states(client) == [EngineState.LIVE] * 2, "it is back", 20.0)
    assert client.audit().orphans == ()
    assert client.generate(prompts(8), params(2))[0].engine is not None


@pytest.mark.slow
def test_a_paused_engine_is_left_alone(pair: SimFleet, make_client: MakeClient) -> None:
    """Somebody else pauses an engine in place for much longer than a dead one has: one attempt for each sample."""
    client = make_client(pair.urls[0], timeouts=WATCHFUL)
    job = client.start(prompts(4), params(1000))
    eventually(lambda: pair.engines[0].state()["running"] == 4, "all run")
    pair.engines[0].call("POST", "/pause_generation", {"mode": "in_place"})
    asked = pair.engines[0].state()["requests"].get("/server_info", 0)
    eventually(lambda: pair.engines[0].state()["requests"].get("/server_info", 0) >= asked + 8, "asked for long", 20.0)
    pair.engines[0].call("POST", "/continue_generation", {})
    assert {sample.attempts for sample in job.result()} == {1}
    assert states(client) == [EngineState.LIVE]


@pytest.mark.slow
def test_our_own_pause_is_left_alone(pair: SimFleet, make_client: MakeClient) -> None:
    """A pause of ours asks nothing at all."""
    client = make_client(pair.urls[0], timeouts=WATCHFUL)
    job = client.start(prompts(4), params(1000))
    eventually(lambda: pair.engines[0].state()["running"] == 4, "all run")
    client.pause("in_place")
    threading.Event().wait(2 * DEAD_S)  # it is the time that must do no harm
    client.resume()
    assert {sample.attempts for sample in job.result()} == {1}


def test_a_silent_engine_without_requests_is_not_watched(make_client: MakeClient) -> None:
    """The watch ends with the last request, and begins with the next."""
    with ScriptedEngine() as engine:
        client = make_client(engine.url, timeouts=WATCHFUL)
        client.generate(prompts(2), params(2))
        eventually(lambda: not any(t.name.endswith("-watch") for t in threading.enumerate()), "the watch has ended")
        client.generate(prompts(2), params(2))
        assert any(thread.name.endswith("-watch") for thread in threading.enumerate())


@pytest.mark.slow
def test_only_current_weights_come_back(pair: SimFleet, make_client: MakeClient) -> None:
    """An engine that died and came back with other weights than the fleet's gets no traffic until it has them."""
    client = make_client(pair, timeouts=WATCHFUL)
    client.engines()
    client._open().fleet.expected_version = "7"
    pair.engines[1].call("POST", "/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    pair.engines[0].kill()
    client.generate(prompts(8), params(2))
    pair.engines[0].restart()
    stale = "stale: it serves weights 'default', the fleet '7'"
    eventually(lambda: client.engines()[0].reason == stale, "it is known to be stale", 20.0)
    assert states(client) == [EngineState.QUARANTINED, EngineState.LIVE]
    pair.engines[0].call("POST", "/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    eventually(lambda: states(client) == [EngineState.LIVE] * 2, "it is back", 20.0)


# --- audit and dump ---------------------------------------------------------------------------------------------------


def test_the_audit_names_what_is_open(pair: SimFleet, make_client: MakeClient) -> None:
    """One engine with room for two: two are there, the others wait; afterwards everything is delivered."""
    client = make_client(pair.urls[0], engine_concurrency=2)
    job = client.start(prompts(5), ENDLESS)
    eventually(lambda: pair.engines[0].state()["running"] == 2, "two run")
    audit = client.audit()
    assert (audit.admitted, audit.delivered, len(audit.open), audit.orphans) == (5, 0, 5, ())
    assert audit.balanced
    there = [sample for sample in audit.open if sample.doing == "is at the engine"]
    assert {sample.rid for sample in there} == {row["rid"] for row in pair.engines[0].state()["generations"]}
    assert {sample.engine for sample in there} == {pair.urls[0]}
    assert f"job 0 sample 0/0 is at the engine {pair.urls[0]} for 0." in str(audit)
    text = client.dump()
    assert repr(text) == text
    assert f"{pair.urls[0]} is live, 2 of 2 in flight" in text
    assert "the gate is open; open samples: " in text
    assert "is at the engine: 2" in text
    assert "waits for a thread: 3" in text
    assert "2 x worker: " in text
    file = io.StringIO()
    client.dump(file)
    assert "audit:\n  5 admitted = 0 delivered + 5 open: balanced" in file.getvalue()
    job.abort()
    assert str(client.audit()) == "5 admitted = 5 delivered + 0 open: balanced"
    assert "open samples: none" in client.dump()


def test_an_abort_that_was_not_delivered_leaves_an_orphan(make_client: MakeClient) -> None:
    """The request broke and its abort is not answered: it may run on, until the engine is proven idle."""
    silent = {"/abort_request": [silence]}

    def breaks(request: object, number: int) -> list[Callable[..., None]]:
        return [reset]

    with ScriptedEngine(breaks, others=silent) as engine, ScriptedEngine() as other:
        client = make_client([engine.url, other.url], timeouts=Timeouts(control_s=0.3))
        samples = client.generate(prompts(2), params(2))
        assert {sample.status for sample in samples} == {Status.TRUNCATED}
        (orphan,) = client.audit().orphans
        assert (orphan.engine, orphan.rid) == (engine.url, engine.rids()[0])
        assert f"possible orphan: rid {orphan.rid} may run on at {engine.url}" in str(client.audit())
        engine._others = {"/abort_request": [answer()]}
        eventually(lambda: client.audit().orphans == (), "proven idle", 20.0)


def test_a_silent_generate_is_named(make_client: MakeClient) -> None:
    """A stuck sample is named, with what it waits for."""
    with ScriptedEngine(quiet) as engine:
        client = make_client(engine.url)
        job = client.start([[1, 2]], params(2))
        eventually(lambda: engine.rids() != [], "it is there")
        (sample,) = client.audit().open
        assert (sample.rid, sample.engine, sample.attempts) == (engine.rids()[0], engine.url, 0)
        assert sample.doing == "is at the engine"
        job.abort(0.1)
