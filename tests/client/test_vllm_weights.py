"""Between steps on vLLM: pauses, memory, caches, weights, and what an engine needs to have been started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rolloutsync import ControlError, EngineState, NotIdleError, Status, UpdateState, WeightUpdateError
from rolloutsync.sim import Fault
from rolloutsync.sim.fleet import SimEngine
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import SHORT, check_sample, params, prompts
from tests.client.vllmkit import MakeClient, alone, await_tokens, called, endless, tidy
from tests.client.weightkit import BUCKET, slowly
from tests.wire import eventually

pytestmark = pytest.mark.slow

RELOAD, START, UPDATE, FINISH = "/collective_rpc", "/start_weight_update", "/update_weights", "/finish_weight_update"
LABELS, SESSIONS = (0, 27, 0), (0, 21, 0)


def is_paused(engine: SimEngine) -> bool:
    paused: bool = engine.state()["paused"]
    return paused


def test_quiet_blocks(newest: SimEngine, make_client: MakeClient) -> None:
    """Proven idle and paused inside; what comes meanwhile waits, and is made after."""
    client = make_client(newest.url)
    job = endless(client, newest, 2)
    with client.quiesced() as report:
        assert report is not None
        assert report.idle
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        assert is_paused(newest)
        later = client.start([[5]], params(4))
        assert not later.wait(0.1)
    check_sample(later.result()[0], [5], 4)
    assert not is_paused(newest)


@pytest.mark.parametrize("mode", ["hold", "wait"])
def test_blocks_that_abort_nothing(mode: str, vllm: SimEngine, make_client: MakeClient) -> None:
    """In "hold" all stands still where it is; "wait" lets what runs end first. Nothing is lost in either."""
    client = make_client(vllm.url)
    with slowly([vllm]):
        job = client.start(prompts(2), params(20))
        await_tokens(vllm, 2)
        with client.quiesced(mode):
            assert is_paused(vllm)
            assert job.wait(2.0 if mode == "wait" else 0.1) is (mode == "wait")
            with pytest.raises(NotIdleError, match="release_memory needs proof of idle"):
                client.release_memory()
    for sample, ids in zip(job.result(), prompts(2), strict=True):
        check_sample(sample, ids, 20)
        assert sample.attempts == 1
    with pytest.raises(ValueError, match=r"mode must be one of \('abort', 'hold', 'wait'\), got 'retract'"):
        client.quiesced("retract")


def test_pauses(vllm: SimEngine, make_client: MakeClient) -> None:
    """In SGLang's word or vLLM's own; an unknown one is refused before anything happens."""
    client = make_client(vllm.url)
    for mode in ("keep", "in_place", "wait", "abort"):
        client.pause(mode)
        assert is_paused(vllm)
        assert client.stats().gate == "hold"
        client.resume()
        assert not is_paused(vllm)
    with pytest.raises(ValueError, match="pause mode must be one of"):
        client.pause("retract")
    assert client.stats().gate == "open"


def test_a_pause_without_an_answer_is_ended(newest: SimEngine, make_client: MakeClient) -> None:
    """A hanging core carries it out when it goes on; the resume comes after it."""
    client = make_client(newest.url, timeouts=replace(SHORT, control_s=0.25))
    client.engines()
    newest.add_fault(Fault(kind="freeze"))
    with pytest.raises(ControlError, match="pause failed"), client.quiesced("hold"):
        pass
    newest.clear_faults()
    eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
    assert not is_paused(newest)
    check_sample(client.generate([[5]], params(4))[0], [5], 4)


def test_a_busy_cache_is_not_emptied(newest: SimEngine, make_client: MakeClient) -> None:
    """vLLM says so within a 200."""
    client = make_client(newest.url)
    client.flush_cache()
    job = endless(client, newest, 1)
    with pytest.raises(ControlError, match="/reset_prefix_cache was refused"):
        client.flush_cache()
    job.abort()


def test_memory_is_given_back(newest: SimEngine, make_client: MakeClient) -> None:
    """The engine ends its pause when it is awake again; within the block it must not."""
    client = make_client(newest.url)
    with client.quiesced():
        with pytest.raises(ValueError, match=r"vLLM releases \['kv_cache'\] or \['kv_cache', 'weights'\]"):
            client.release_memory(["weights"])
        client.release_memory(["weights", "kv_cache"])
        assert newest.call("GET", "/is_sleeping") == {"is_sleeping": True}
        client.resume_memory(["weights"])
        client.resume_memory(["kv_cache"])
        assert is_paused(newest)
    assert not is_paused(newest)
    check_sample(client.generate([[5]], params(4))[0], [5], 4)


@pytest.mark.parametrize("mode", [pytest.param("abort", marks=pytest.mark.slow), "hold"])
def test_weights_from_disk(mode: str, vllm: SimEngine, make_client: MakeClient) -> None:
    """By the worker's own method; the engine bears the label where it can, and gets traffic either way."""
    client = make_client(vllm.url)
    report = client.update_weights_from_disk("ckpt/7", version="7", mode=mode)
    labels = vllm.config.release >= LABELS
    (told,) = report.engines
    assert (told.state, told.version, told.flushed) == (UpdateState.UPDATED, "7" if labels else None, True)
    (sample,) = client.generate([[5, 6]], params(4))
    assert sample.output_ids.tolist() == expected_tokens([5, 6], 4, version="7" if labels else "default")
    assert client.engines()[0].weight_version == "7"
    assert called(vllm)[RELOAD] == 1
    assert START not in called(vllm)
    assert not is_paused(vllm)


@pytest.mark.slow
def test_an_engine_without_labels_keeps_ours(make_client: MakeClient) -> None:
    """A quarantine does not lose it; when the engine was gone it does, for nobody knows what came back."""
    with alone("0.22") as engine:
        client = make_client(engine.url)
        client.update_weights_from_disk("ckpt/7", version="7")
        core = client._open()
        core.fleet.set_state(engine.url, EngineState.QUARANTINED, "for a test")
        eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
        core.fleet.set_state(engine.url, EngineState.QUARANTINED, "for a test")
        engine.kill()
        eventually(lambda: client.engines()[0].weight_version is None, "it is found gone")
        engine.restart()
        eventually(lambda: "stale: it serves weights None" in client.engines()[0].reason, "it is back, and stale")
        client.update_weights_from_disk("ckpt/8", version="8")
        eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it has the weights")


def test_a_broadcast(vllm: SimEngine, make_client: MakeClient) -> None:
    """The transfer is set up once; each update is a session where the version wants one, in a pause."""
    client = make_client(vllm.url)
    group = client.init_group("127.0.0.1", 29_500)
    group.wait(10.0)
    assert (group.world_size, dict(group.rank_offsets)) == (2, {vllm.url: 1})
    with client.weight_update("3", mode="hold") as update:
        for _ in range(2):
            update.from_distributed(*BUCKET).result(10.0)
    asked = called(vllm)
    assert (asked[UPDATE], asked.get(FINISH, 0)) == (2, int(vllm.config.release >= SESSIONS))
    assert update.report is not None
    assert update.report.stale == ()
    client.destroy_group()
    assert client.generate([[5]], params(4))[0].error is None


def test_a_broadcast_without_a_group(newest: SimEngine, make_client: MakeClient) -> None:
    """The engine says what is missing, and is stale."""
    newest.call("POST", "/shutdown_weight_transfer_engine")
    client = make_client(newest.url)
    with (
        pytest.raises(WeightUpdateError, match="weight transfer not initialized") as caught,
        client.weight_update("3") as update,
    ):
        update.from_distributed(*BUCKET)
    assert caught.value.report.engines[0].state is UpdateState.STALE
    assert client.engines()[0].state is EngineState.QUARANTINED
    client.update_weights_from_disk("ckpt/4", version="4")


@pytest.mark.parametrize(
    "fault",
    [{"kind": "status", "status": 500}, pytest.param({"kind": "reset"}, marks=pytest.mark.slow)],
    ids=["refused", "broken"],
)
def test_a_reload_that_fails(fault: dict[str, Any], newest: SimEngine, make_client: MakeClient) -> None:
    """It may leave the model without weights, so nothing is sent there until it has some."""
    client = make_client(newest.url, timeouts=replace(SHORT, engine_wait_s=0.1))
    newest.add_fault(Fault(path=RELOAD, **fault))
    with pytest.raises(WeightUpdateError, match="update from disk"):
        client.update_weights_from_disk("ckpt/7", version="7")
    status = client.engines()[0]
    assert status.state is EngineState.QUARANTINED
    assert status.reason.startswith("stale")
    (sample,) = client.generate([[5]], params(4), on_error="return")
    assert sample.status is Status.FAILED
    assert newest.state()["started"] == 0
    newest.clear_faults()
    client.update_weights_from_disk("ckpt/8", version="8")
    eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it has weights again")


def test_a_reload_that_fails_without_labels(vllm_of: Callable[[str], SimEngine], make_client: MakeClient) -> None:
    """Even under the label that it had: what was said of its weights before holds no more."""
    engine = vllm_of("0.22.0")
    tidy(engine)
    client = make_client(engine.url)
    client.update_weights_from_disk("ckpt/7", version="7", mode="hold")
    engine.add_fault(Fault(kind="status", status=500, path=RELOAD))
    report = client.update_weights_from_disk("ckpt/bad", version="7", mode="hold", raise_on_stale=False)
    assert [told.state for told in report.engines] == [UpdateState.STALE]
    assert (client.engines()[0].weight_version, client.engines()[0].state) == (None, EngineState.QUARANTINED)
    tidy(engine)


def test_checksums(newest: SimEngine, make_client: MakeClient) -> None:
    """One over those of all parameters."""
    client = make_client(newest.url)
    report = client.update_weights_from_disk("ckpt/7", version="7", verify="checksum")
    assert len(report.engines[0].checksum or "") == 64


def test_what_the_development_mode_is_for(bare: SimEngine, make_client: MakeClient) -> None:
    """Without it every verb between steps says how to start the server."""
    client = make_client(bare.url)
    hint = r"if it is started with VLLM_SERVER_DEV_MODE=1"
    for verb in (client.pause, client.flush_cache, client.resume):
        with pytest.raises(ControlError, match=hint):
            verb()
    with pytest.raises(ControlError, match=hint):
        client.update_weights_from_disk("ckpt/7", version="7", mode="hold")
    with pytest.raises(ControlError, match=hint):
        client.control("/collective_rpc", {"method": "x"})
