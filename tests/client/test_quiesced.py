"""quiesced(): engines that are proven idle or held in place, and always continued; memory; blocks in blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rolloutsync import ControlError, NotIdleError, RolloutClient, RolloutError, Status, Timeouts
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.background import in_thread
from tests.client.kit import ENDLESS, calls, check_sample, error_answer, params, prompts
from tests.client.weightkit import WeightEngine, slowly
from tests.wire import WAIT_S, close, eventually, silence

MakeClient = Callable[..., RolloutClient]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def running(client: RolloutClient) -> int:
    return sum(load.running for load in client.loads().values())


def paused(fleet: SimFleet, count: int) -> list[bool]:
    return [engine.state()["paused"] for engine in fleet.engines[:count]]


def test_abort_gives_partials_and_a_proof(fleet: SimFleet, make_client: MakeClient) -> None:
    """Inside nothing runs and nothing leaves; what comes meanwhile waits, and is made after."""
    client = make_client(fleet[:2])
    job = client.start(prompts(4), ENDLESS)
    eventually(lambda: running(client) == 4, "they run")
    with client.quiesced() as report:
        assert report is not None
        assert report.idle
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        assert paused(fleet, 2) == [True, True]
        assert client.stats().gate == "hold"
        later = client.start([[5]], params(4), timeout=0.3)
        assert not later.wait(0.4)
    check_sample(later.result()[0], [5], 4)
    assert paused(fleet, 2) == [False, False]
    assert client.stats().gate == "open"


@pytest.mark.parametrize("mode", ["hold", "retract"])
def test_hold_and_retract_lose_nothing(fleet: SimFleet, make_client: MakeClient, mode: str) -> None:
    """What runs goes on after the block, and is what it would have been; no attempt is used."""
    client = make_client(fleet[:2])
    with slowly(fleet.engines[:2]):
        job = client.start(prompts(4), params(150), timeout=8.0)
        eventually(lambda: running(client) == 4, "they run")
        with client.quiesced(mode) as report:
            assert report is None
            assert paused(fleet, 2) == [True, True]
            assert not job.wait(0.1)
            with pytest.raises(NotIdleError, match="release_memory needs proof of idle"):
                client.release_memory()
    for sample, ids in zip(job.result(), prompts(4), strict=True):
        check_sample(sample, ids, 150)
        assert sample.attempts == 1
    assert calls(fleet, RELEASE) == 0


def test_the_colocated_sequence(fleet: SimFleet, make_client: MakeClient) -> None:
    """Quiet, memory away, (training), weights' memory, tensors, cache's memory, on: with the new weights."""
    client = make_client(fleet[:2])
    check_sample(client.generate([[5, 6]], params(4))[0], [5, 6], 4)
    with client.quiesced():
        client.release_memory(["weights", "kv_cache"])
        client.resume_memory(["weights"])
        with client.weight_update("2", verify="checksum") as update:
            for bucket in ("QQ==", "Qg=="):
                update.from_tensor({url: [bucket] for url in fleet[:2]})
        assert paused(fleet, 2) == [True, True]
        client.resume_memory(["kv_cache"])
    (sample,) = client.generate([[5, 6]], params(4))
    assert sample.output_ids.tolist() == expected_tokens([5, 6], 4, version="2")
    assert [engine.state()["requests"][RESUME] for engine in fleet.engines[:2]] == [2, 2]
    assert calls(fleet, "/continue_generation") == 2


def test_only_the_outer_block_resumes(fleet: SimFleet, make_client: MakeClient) -> None:
    """However many are inside, and however they end."""
    client = make_client(fleet[0])
    with client.quiesced() as outer:
        with pytest.raises(KeyError), client.quiesced("hold"):
            raise KeyError
        with client.quiesced() as inner:
            assert inner is outer
        client.update_weights_from_disk("new", "2", "retract")
        assert paused(fleet, 1) == [True]
        assert client.stats().gate == "hold"
    assert calls(fleet, "/pause_generation") == 1
    assert calls(fleet, "/continue_generation") == 1
    assert client.stats().gate == "open"


def test_blocks_of_two_threads(fleet: SimFleet, make_client: MakeClient) -> None:
    """The last one out resumes."""
    client = make_client(fleet[0])
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with client.quiesced("hold"):
            inside.set()
            assert leave.wait(WAIT_S)

    with client.quiesced():
        thread = in_thread(other)
        assert inside.wait(WAIT_S)
    assert paused(fleet, 1) == [True]
    leave.set()
    thread.result(WAIT_S)
    assert paused(fleet, 1) == [False]


def test_a_stronger_mode_inside_is_refused(fleet: SimFleet, make_client: MakeClient) -> None:
    """A proof of idle would end what the outer block holds."""
    client = make_client(fleet[0])
    with client.quiesced("hold"):
        with pytest.raises(ValueError, match="mode 'abort' is not possible inside a block of mode 'hold'"):
            client.update_weights_from_disk("new")
        client.update_weights_from_disk("new", "2", "hold")
    assert client.stats().gate == "open"


@pytest.mark.parametrize("verb", ["abort_until_idle", "pause", "resume"])
def test_verbs_that_would_end_the_quiet(fleet: SimFleet, make_client: MakeClient, verb: str) -> None:
    """Are refused inside, from any thread."""
    client = make_client(fleet[0])
    with client.quiesced("hold"), pytest.raises(RolloutError, match=rf"{verb}\(\) is refused while quiesced"):
        in_thread(getattr(client, verb)).result(WAIT_S)
    getattr(client, verb)()
    client.resume()


def test_a_pause_of_the_user_outlives_the_block(fleet: SimFleet, make_client: MakeClient) -> None:
    """It is the outer one."""
    client = make_client(fleet[0])
    client.pause("in_place")
    with client.quiesced("hold"):
        pass
    assert paused(fleet, 1) == [True]
    assert client.stats().gate == "hold"
    client.resume()
    assert client.stats().gate == "open"


def test_an_engine_that_is_not_idle(fleet: SimFleet, make_client: MakeClient) -> None:
    """Nothing is paused, and the gate is open again."""
    client = make_client(fleet[:2])
    fleet.engines[1].add_fault(Fault(kind="stuck_load", times=None))
    with pytest.raises(NotIdleError, match=f"{fleet[1]}: Busy"), client.quiesced(timeout=0.2):
        raise AssertionError("entered")
    with pytest.raises(NotIdleError), client.weight_update(timeout=0.1):
        raise AssertionError("entered")
    assert calls(fleet, "/pause_generation") == 0
    assert client.stats().gate == "open"
    fleet.engines[1].clear_faults()
    assert len(client.update_weights_from_disk("new").updated) == 2


@pytest.mark.slow
def test_a_quarantined_engine_does_not_stand_in_the_way(fleet: SimFleet, make_client: MakeClient) -> None:
    """It gets no traffic anyway, so it is left out."""
    client = make_client(fleet[:2])
    fleet.engines[0].add_fault(Fault(kind="status", status=400, path="/update_weights_from_disk", body={}))
    assert client.update_weights_from_disk("new", mode="hold", raise_on_stale=False).stale[0].url == fleet[0]
    fleet.engines[0].add_fault(Fault(kind="stuck_load", times=None))
    report = client.update_weights_from_disk("new", timeout=0.4)
    assert [engine.state.value for engine in report.engines] == ["absent", "updated"]


def test_a_pause_that_is_refused(make_client: MakeClient) -> None:
    """The others are continued, and nothing is held."""
    with WeightEngine() as good, WeightEngine({"/pause_generation": error_answer("500 Oops")}) as bad:
        client = make_client([good.url, bad.url])
        with pytest.raises(ControlError, match="pause failed") as caught, client.quiesced("hold"):
            raise AssertionError("entered")
        assert list(caught.value.errors) == [bad.url]
        assert good.steps() == ["pause_generation", "continue_generation"]
        assert client.stats().gate == "open"


@pytest.mark.parametrize(
    "breaks",
    [[close], error_answer("500 Oops"), pytest.param([silence], marks=pytest.mark.slow)],
    ids=["closed", "500", "silent"],
)
def test_an_engine_that_is_not_continued(make_client: MakeClient, breaks: Any) -> None:
    """It gets no traffic, the others do; a broken connection is tried once more, since it can do no harm twice."""
    with WeightEngine() as good, WeightEngine({"/continue_generation": breaks}) as bad:
        client = make_client([good.url, bad.url], timeouts=Timeouts(control_s=0.5))
        with client.quiesced("hold"):
            pass
        assert bad.counts()["/continue_generation"] == (2 if breaks == [close] else 1)
        states = {status.url: (str(status.state), status.paused) for status in client.engines()}
        assert states == {good.url: ("live", False), bad.url: ("quarantined", True)}
        assert client.stats().gate == "open"
        bad._others = {}
        client.resume()
        assert not any(status.paused for status in client.engines())


def test_an_engine_that_dies_in_the_block(make_client: MakeClient) -> None:
    """It holds nobody up."""
    with WeightEngine() as good, WeightEngine() as bad:
        client = make_client([good.url, bad.url])
        with client.quiesced():
            bad.server.die()
            bad.server.await_ended(bad.server.accepted)
        assert [str(status.state) for status in client.engines()] == ["live", "down"]
        assert good.steps() == ["pause_generation", "continue_generation"]
        assert client.stats().gate == "open"
