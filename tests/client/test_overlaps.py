"""Control verbs that overlap, engines that go while they are drained, and waits that are paid once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutsync import ControlError, IdleState, NotIdleError, RolloutClient, Status, Timeouts
from rolloutsync.clock import Clock
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, ScriptedEngine, good, params, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]
CLOCK = Clock()
STUCK = Fault(kind="stuck_load", times=None)


def in_flight(client: RolloutClient) -> int:
    return sum(engine.in_flight for engine in client.engines())


def test_resume_cannot_open_the_gate_of_a_running_drain(fleet: SimFleet, make_client: MakeClient) -> None:
    """Nothing leaves before the drain has proven all engines idle; its report and the proof stay true."""
    client = make_client([fleet[0], fleet[1]])
    fleet.engines[1].add_fault(STUCK)
    drain = in_thread(lambda: client.abort_until_idle(20.0, keep_closed=True))
    eventually(lambda: client.stats().gate == "abort", "the gate is closed")
    client.resume()
    assert client.stats().gate == "abort"
    job = client.start(prompts(4), ENDLESS)
    fleet.engines[1].clear_faults()
    assert drain.result(10.0).idle
    assert {load.running for load in client.loads().values()} == {0}
    client.release_memory(["kv_cache"])
    client.resume_memory(["kv_cache"])
    client.resume()
    job.abort()
    assert fleet.engines[0].alive


def test_a_failed_drain_takes_back_its_own_gate_alone(fleet: SimFleet, make_client: MakeClient) -> None:
    """A short drain that fails neither opens the gate of a longer one, nor lifts the hold of an earlier one."""
    client = make_client(fleet[0])
    assert client.abort_until_idle(10.0, keep_closed=True).idle
    fleet.engines[0].add_fault(STUCK)
    long = in_thread(lambda: client.abort_until_idle(20.0, keep_closed=True))
    eventually(lambda: client.stats().gate == "abort", "the long drain runs")
    assert not client.abort_until_idle(0.3, keep_closed=True, raise_on_timeout=False).idle
    assert client.stats().gate == "abort"
    fleet.engines[0].clear_faults()
    assert long.result(10.0).idle
    assert client.stats().gate == "hold"
    client.resume()


def test_an_engine_that_dies_does_not_fail_the_drain(make_client: MakeClient) -> None:
    """What was in flight there ends with it: reported as Gone, with nothing of ours left."""
    with SimFleet(engines=2, tokens_per_second=500.0) as fleet:
        client = make_client(fleet)
        job = client.start(prompts(32), ENDLESS)
        eventually(lambda: sum(load.running for load in client.loads().values()) == 32, "all run")
        fleet.engines[1].kill()
        report = client.abort_until_idle(20.0)
        assert report.idle
        assert [drain.state for drain in report.engines] == [IdleState.IDLE, IdleState.GONE]
        assert report.engines[1].rids == ()
        assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_an_engine_that_is_removed_and_added_again_is_probed(make_client: MakeClient) -> None:
    """Its old probe, which may be napping, does not stand in for the new one."""
    with ScriptedEngine(good) as engine:
        url = engine.url
    client = make_client(url, timeouts=Timeouts(engine_wait_s=20.0))
    assert client.engines()[0].state.value == "down"
    client.remove_engine(url)
    client.add_engine(url)
    port = int(url.rpartition(":")[2])
    waiting = in_thread(lambda: client.generate([[5]], params(2)))
    with SimFleet(engines=1, port=port):
        assert waiting.result(15.0)[0].status is Status.TRUNCATED


def test_the_wait_for_an_engine_is_paid_once(make_client: MakeClient) -> None:
    """Samples that wait behind others for a thread do not begin it anew."""
    with ScriptedEngine(good) as engine:
        url = engine.url
    client = make_client(url, engine_concurrency=4, timeouts=Timeouts(engine_wait_s=1.0))
    began = CLOCK.monotonic()
    samples = client.generate(prompts(40), params(2), on_error="return")
    assert {sample.status for sample in samples} == {Status.FAILED}
    assert "no live engine within 1 s" in str(samples[-1].error)
    assert 0.9 < CLOCK.monotonic() - began < 2.0


def test_a_pause_without_an_answer_may_have_happened(make_client: MakeClient) -> None:
    """A drain continues such an engine first, instead of watching frozen timestamps until its deadline."""
    with SimFleet(engines=1) as fleet:
        client = make_client(fleet, timeouts=Timeouts(control_s=0.5))
        job = client.start(prompts(4), ENDLESS)
        eventually(lambda: in_flight(client) == 4 and client.loads()[fleet[0]].running == 4, "all run")
        fleet.engines[0].add_fault(Fault(kind="delay", path="/pause_generation", seconds=1.0, after=True))
        with pytest.raises(ControlError, match="pause failed at 1 of 1"):
            client.pause("in_place")
        assert client.engines()[0].paused
        assert client.abort_until_idle(10.0).seconds < 4.0
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        client.resume()


def test_a_pause_while_a_drain_runs(fleet: SimFleet, make_client: MakeClient) -> None:
    """The drain continues the engine before its next reading."""
    client = make_client(fleet[0])
    job = client.start(prompts(2), ENDLESS)
    eventually(lambda: client.loads()[fleet[0]].running == 2, "both run")
    fleet.engines[0].add_fault(Fault(kind="ignore_abort", times=2))
    drain = in_thread(lambda: client.abort_until_idle(15.0))
    eventually(lambda: client.stats().gate == "abort", "the drain runs")
    client.pause("in_place")
    assert drain.result(15.0).seconds < 6.0
    client.resume()
    assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_a_second_pause_mode_replaces_the_first(fleet: SimFleet, make_client: MakeClient) -> None:
    """Stacked on top of the first it could block the engine for good."""
    client = make_client(fleet[0])
    job = client.start(prompts(2), ENDLESS)
    eventually(lambda: client.loads()[fleet[0]].running == 2, "both run")
    client.pause("in_place")
    client.pause("abort")
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    client.resume()
    assert client.generate([[5]], params(2))[0].status is Status.TRUNCATED


def test_scope_own_ends_our_own_pause_too(fleet: SimFleet, make_client: MakeClient) -> None:
    """Requests that stand still answer no abort."""
    client = make_client(fleet[0])
    job = client.start(prompts(2), ENDLESS)
    eventually(lambda: client.loads()[fleet[0]].running == 2, "both run")
    client.pause("in_place")
    assert client.abort_until_idle(10.0, scope="own").idle
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    client.resume()


@pytest.mark.parametrize("tags", ["weights", [1], ["weights", None]])
def test_memory_tags_are_a_list_of_strings(fleet: SimFleet, make_client: MakeClient, tags: object) -> None:
    """A bare string is not taken apart."""
    client = make_client(fleet[0])
    client.abort_until_idle(10.0, keep_closed=True)
    for verb in (client.release_memory, client.resume_memory):
        with pytest.raises(TypeError, match="tags must be a list of strings"):
            verb(tags)  # type: ignore[arg-type]  # the point


def test_memory_needs_a_proof_that_still_holds(fleet: SimFleet, make_client: MakeClient) -> None:
    """It ends when the gate opens."""
    client = make_client(fleet[0])
    client.abort_until_idle(10.0, keep_closed=True)
    client.resume()
    with pytest.raises(NotIdleError, match="needs proof of idle"):
        client.release_memory()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session": 5}, r"session must be an object with a method request\(\), got 5"),
        ({"tokenizer": 5}, r"tokenizer must be an object with a method apply_chat_template\(\), got 5"),
        ({"progress": "a"}, "progress must be True, False or None, got 'a'"),
        ({"progress": 1}, "progress must be True, False or None, got 1"),
    ],
)
def test_constructor_arguments_of_the_wrong_kind(options: dict[str, object], message: str) -> None:
    """Named with their value."""
    with pytest.raises(TypeError, match=message):
        RolloutClient("http://127.0.0.1:1", **options)  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3}, "one submit makes one sample"),
        ({"on_error": "raise"}, "it belongs to generate and start"),
        ({"progress": True}, "it belongs to generate and start"),
        ({"metadata": {"a": 1}}, "it goes into the items of the batch"),
        ({"top_logprobs_num": -1}, "top_logprobs_num must be at least 0, got -1"),
        ({"logprob_start_len": "a"}, "logprob_start_len must be an integer, got 'a'"),
        ({"return_logprob": "yes"}, "return_logprob must be True or False, got 'yes'"),
    ],
)
def test_submit_refuses_what_it_cannot_do(
    fleet: SimFleet, make_client: MakeClient, fields: dict[str, object], message: str
) -> None:
    """Before anything is sent."""
    client = make_client(fleet[0])
    with pytest.raises((TypeError, ValueError), match=message):
        client.submit([5], params(2), **fields)  # type: ignore[arg-type]  # the point
    assert client.stats().admitted == 0
