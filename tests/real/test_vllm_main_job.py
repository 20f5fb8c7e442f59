"""The main job on real vLLM, through the client: generate, abort until idle, pauses, weights; deaths; a mixed fleet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from rolloutsync import (
    ControlError,
    EngineState,
    IdleState,
    NotIdleError,
    RolloutClient,
    Sample,
    Status,
    Timeouts,
    UnsupportedError,
    UpdateState,
)

from .kit import Kit
from .launch import RealEngine, start_all, stop_all
from .raw_vllm import await_equal, gauge
from .test_main_job import await_true, check_aligned, prompt, rescored
from .vllm import CPU, FULL, VllmEngine, frozen, slowed

pytestmark = pytest.mark.real

LONG: dict[str, Any] = {"max_new_tokens": 1900, "ignore_eos": True}
PROOF = "its load is zero; its front end holds nothing; its core answers"
WEAK = "its load is zero for 1 s; nobody can ask its front end; nobody can ask its core"


@pytest.fixture
def client(vllm: RealEngine) -> Iterator[RolloutClient]:
    """A client that finds out by itself what it speaks to, and sends eight requests where four run."""
    with RolloutClient(vllm.url, engine_concurrency=8) as made:
        yield made


@pytest.fixture
def mortal(vllm_kit: Kit, tmp_path: Path) -> Iterator[RealEngine]:
    """A vLLM engine that nobody else uses."""
    engine = VllmEngine(vllm_kit, vllm_kit.llama, tmp_path / "mortal.log", FULL, device=CPU)
    start_all([engine])
    yield engine
    stop_all([engine], grace_s=0.0)


def get(url: str, path: str) -> requests.Response:
    """What the engine itself says, asked without our client."""
    with requests.Session() as session:
        session.trust_env = False
        return session.get(f"{url}{path}", timeout=10)


def await_running(engine: RealEngine, running: int, waiting: int = 0) -> None:
    """By its gauges: those that run have brought tokens. ``/load``, which our client asks too, counts them sooner."""

    def counts() -> tuple[int, int]:
        metrics = get(engine.url, "/metrics").text
        return gauge(metrics, "running"), gauge(metrics, "waiting")

    await_equal(counts, (running, waiting), f"{engine.url}: running and waiting")


def greedy(client: RolloutClient, **more: Any) -> list[int]:
    (sample,) = client.generate([prompt(1)], {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **more})
    assert sample.error is None
    return [int(token) for token in sample.output_ids]


def test_64_prompts_x_2(client: RolloutClient, vllm: RealEngine) -> None:
    """Every sample comes back, in order, with logprobs that are its own."""
    batch = [prompt(number) for number in range(64)]
    samples = client.generate(batch, {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}, n=2)
    assert [(s.index, s.member) for s in samples] == [(index, member) for index in range(64) for member in range(2)]
    assert {(s.status, s.attempts, s.engine) for s in samples} == {(Status.TRUNCATED, 1, vllm.url)}
    for sample in samples:
        assert sample.prompt_tokens == len(batch[sample.index])
        assert sample.meta_info["request_id"] == f"generate-tokens-{sample.rid}"
        assert [span.version for span in sample.weight_spans] == ["default"]
    check_aligned(samples)
    for sample, again in zip(samples, rescored(client, samples), strict=True):
        assert sample.logprobs is not None
        np.testing.assert_allclose(sample.logprobs, again, atol=0.15)  # bfloat16: prefill and decode round apart
    (status,) = client.engines()
    assert (status.dialect, status.version, status.dp_size) == ("vllm", vllm.version, 1)


def test_all_that_can_be_asked_for(client: RolloutClient) -> None:
    """A text, likeliest tokens, a seed, stops; what vLLM would drop without a word is refused."""
    text, top, one, two, lacking = client.generate(
        [
            {"text": "a text"},
            {"input_ids": prompt(1), "top_logprobs_num": 3},
            {"input_ids": prompt(2), "sampling_params": {"seed": 5}},
            {"input_ids": prompt(2), "sampling_params": {"seed": 5}},
            {"input_ids": prompt(3), "sampling_params": {"stop_regex": "x"}},
        ],
        {"max_new_tokens": 6, "ignore_eos": True},
        on_error="return",
    )
    check_aligned([text, top, one, two])
    assert text.prompt.input_ids is not None
    assert top.top_logprobs is not None
    assert top.top_logprobs.ids.shape == (6, 3)
    assert one.output_ids.tolist() == two.output_ids.tolist()
    assert isinstance(lacking.error, UnsupportedError)
    assert "stop_regex" in lacking.error.message


@pytest.mark.usefixtures("slow_vllm")
def test_an_abort_in_flight_and_in_the_queue(client: RolloutClient, vllm: RealEngine) -> None:
    """Four come back with tokens, four without; then the engine is idle, by more than its gauges."""
    job = client.start([prompt(number) for number in range(8)], LONG)
    await_running(vllm, 4, 4)
    report = client.abort_until_idle(30)
    (drain,) = report.engines
    assert (drain.state, drain.basis) == (IdleState.IDLE, PROOF)
    metrics = get(vllm.url, "/metrics").text
    assert all(f"vllm:num_requests_{what}{{" in metrics for what in ("running", "waiting"))
    assert [
        line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")
    ] == ["0.0"]
    samples = job.result()
    assert {(s.status, s.error) for s in samples} == {(Status.ABORTED, None)}
    assert sorted(len(s.output_ids) > 0 for s in samples) == [False] * 4 + [True] * 4
    check_aligned(samples)


def test_an_abort_before_the_first_step_has_ended(client: RolloutClient) -> None:
    """The gauges show nothing of what has just come, and the drain ends it all the same."""
    client.engines()
    for number in range(5):
        ids = [11 + (7 * number + k) % 300 for k in range(1000)]
        job = client.start([ids], {"max_new_tokens": 1000, "ignore_eos": True})
        await_true(lambda: client.engines()[0].in_flight == 1)
        assert client.abort_until_idle(30).idle
        assert [s.status for s in job.result()] == [Status.ABORTED]


def test_own_scope_leaves_others_alone(client: RolloutClient, vllm: RealEngine) -> None:
    """A job that is left early aborts its own requests; another client's run on."""
    with RolloutClient(vllm.url) as evaluation:
        other = evaluation.start([prompt(40)], LONG)
        with client.start([prompt(41), "a text"], LONG) as job:
            await_true(lambda: client.engines()[0].in_flight == 2 and client.loads()[vllm.url].running >= 1)
        assert [s.status for s in job.partials] == [Status.ABORTED] * 2
        (kept,) = other.result()
    assert (kept.status, len(kept.output_ids)) == (Status.TRUNCATED, 1900)


def test_a_partial_goes_on_exactly(client: RolloutClient, vllm: RealEngine) -> None:
    """Over two aborts, at temperature 0: the tokens of an uncut run."""
    params = {**LONG, "temperature": 0}  # a quick machine must not end it between two looks
    (whole,) = client.generate([prompt(3)], params)
    batch: list[Any] = [prompt(3)]
    for _ in range(2):
        with slowed(vllm):
            job = client.start(batch, params)
            await_running(vllm, 1)
            client.abort_until_idle(30)
        batch = job.result()
        assert batch[0].status is Status.ABORTED
    (resumed,) = client.generate(batch)
    check_aligned([resumed])
    assert len(resumed.output_ids) == 1900
    assert resumed.attempts >= 3
    cut = min(len(batch[0].output_ids) + 1, 1900)
    assert resumed.output_ids[:cut].tolist() == whole.output_ids[:cut].tolist()


@pytest.mark.parametrize("mode", ["hold", "wait"])
def test_blocks_that_abort_nothing(mode: str, client: RolloutClient, vllm: RealEngine) -> None:
    """What runs stands still or ends first; nothing is lost, no attempt used."""
    with slowed(vllm):
        job = client.start([prompt(number) for number in range(4)], LONG)
        await_running(vllm, 4)
    with client.quiesced(mode):
        assert get(vllm.url, "/is_paused").json() == {"is_paused": True}
        assert job.wait(10.0 if mode == "wait" else 0.5) is (mode == "wait")
    assert get(vllm.url, "/is_paused").json() == {"is_paused": False}
    samples = job.result()
    assert {(s.status, s.attempts, len(s.output_ids)) for s in samples} == {(Status.TRUNCATED, 1, 1900)}


@pytest.mark.usefixtures("slow_vllm")
def test_a_drain_ends_our_own_pause(client: RolloutClient, vllm: RealEngine) -> None:
    """And everything that was held in it."""
    job = client.start([prompt(number) for number in range(4)], LONG)
    await_running(vllm, 4)
    client.pause("in_place")
    try:
        assert client.abort_until_idle(30).idle
    finally:
        client.resume()
    assert [s.status for s in job.result()] == [Status.ABORTED] * 4


def test_a_pause_by_somebody_else(client: RolloutClient, vllm: RealEngine) -> None:
    """What we send meanwhile waits in the engine, is one attempt, and can be aborted there."""
    client.engines()
    with RolloutClient(vllm.url) as other:
        other.pause("keep")
        try:
            job, doomed = client.start([prompt(1)], {"max_new_tokens": 4}), client.start([prompt(2)], LONG)
            await_true(lambda: client.engines()[0].in_flight == 2)
            doomed.abort()
            assert doomed.result()[0].status is Status.ABORTED
            assert not job.wait(0.3)
        finally:
            other.resume()
        assert [s.attempts for s in job.result()] == [1]


@pytest.mark.usefixtures("slow_vllm")
def test_memory_and_caches(client: RolloutClient, vllm: RealEngine) -> None:
    """Given back in a block, taken again; the engine is paused until the block ends."""
    client.flush_cache()
    before = greedy(client)
    with client.quiesced():
        client.release_memory()
        client.resume_memory()
        assert get(vllm.url, "/is_paused").json() == {"is_paused": True}
    assert greedy(client) == before
    job = client.start([prompt(1)], LONG)
    await_running(vllm, 1)
    with pytest.raises(ControlError, match="/reset_prefix_cache was refused"):
        client.flush_cache()
    job.abort()


def test_weights_from_disk(client: RolloutClient, vllm: RealEngine, vllm_kit: Kit) -> None:
    """Other tokens, and the first ones again; a request that is held says which weights made what."""
    before = greedy(client)
    try:
        report = client.update_weights_from_disk(vllm_kit.llama_other, version="12")
        assert [(e.state, e.version, e.flushed) for e in report.engines] == [(UpdateState.UPDATED, "12", True)]
        assert greedy(client) != before
        with slowed(vllm):
            job = client.start([prompt(2)], {"max_new_tokens": 1000, "ignore_eos": True})
            await_running(vllm, 1)
    finally:
        report = client.update_weights_from_disk(vllm_kit.llama, version="13", mode="hold")
    (sample,) = job.result()
    assert [span.version for span in sample.weight_spans if span.version in {"12", "13"}] == ["12", "13"]
    assert not report.engines[0].flushed
    client.flush_cache()
    assert greedy(client) == before
    assert client.weight_versions() == {client.engines()[0].url: "13"}


def test_an_engine_without_flags(plain_vllm: RealEngine) -> None:
    """Completions generate; a drain cuts what is ours and says how little its proof rests on; verbs say what to do."""
    with RolloutClient(plain_vllm.url, engine_concurrency=8) as client:
        samples = client.generate([prompt(number) for number in range(8)], {"max_new_tokens": 8, "ignore_eos": True})
        assert {(s.status, s.attempts) for s in samples} == {(Status.TRUNCATED, 1)}
        check_aligned(samples)
        assert client.engines()[0].version == plain_vllm.version
        with slowed(plain_vllm):
            job = client.start([prompt(number) for number in range(8)], LONG)
            await_running(plain_vllm, 4, 4)
            report = client.abort_until_idle(30)
        assert report.engines[0].basis == WEAK
        assert {s.status for s in job.result()} == {Status.ABORTED}
        with pytest.raises(ControlError, match="VLLM_SERVER_DEV_MODE=1"):
            client.flush_cache()


@pytest.mark.timeout(600)
def test_deaths(mortal: RealEngine, vllm: RealEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """One story, since engines take long to start: frozen, killed, restarted; every sample completes."""
    with RolloutClient(mortal.url) as client:
        with slowed(mortal):
            job = client.start([prompt(number) for number in range(4)], LONG)
            await_running(mortal, 4)
        with frozen(mortal):
            with pytest.raises(NotIdleError, match="Frozen"):
                client.abort_until_idle(3.0)
            ended = [(s.status, s.error, len(s.output_ids) > 0) for s in job.result()]
            assert ended == [(Status.ABORTED, None, True)] * 4
        assert client.abort_until_idle(30).idle
    with RolloutClient([mortal.url, vllm.url], timeouts=Timeouts(dead_s=6.0)) as client:
        told = [moved(client, mortal), killed(client, mortal)]
    with capsys.disabled():
        print("", *told, sep="\n")


def moved(client: RolloutClient, engine: RealEngine) -> str:
    """Its core stands still behind a front end that answers, says it is well, and tells its gauges."""
    with slowed(engine):
        job = client.start([prompt(number) for number in range(8)], {"max_new_tokens": 500, "ignore_eos": True})
        await_running(engine, 4)
    begun = time.monotonic()
    with frozen(engine):
        samples = job.result()
        seconds = time.monotonic() - begun
        assert {(s.status, len(s.output_ids)) for s in samples} == {(Status.TRUNCATED, 500)}
        assert states(client) == [EngineState.QUARANTINED, EngineState.LIVE]
        reason = client.engines()[0].reason
    await_true(lambda: states(client) == [EngineState.LIVE] * 2, 60.0)
    return f"frozen core among two: 8 of 8 samples after {seconds:.0f} s ({reason})"


def killed(client: RolloutClient, engine: RealEngine) -> str:
    """kill -9 of one of two in mid-batch, and its return on the same port."""
    job = client.start([prompt(number) for number in range(32)], {"max_new_tokens": 200, "ignore_eos": True})
    await_true(lambda: all(engine.in_flight >= 4 for engine in client.engines()))
    begun = time.monotonic()
    engine.kill()
    samples = job.result()
    seconds = time.monotonic() - begun
    assert [s.status for s in samples] == [Status.TRUNCATED] * 32
    check_aligned(samples)
    assert states(client)[0] in {EngineState.DOWN, EngineState.QUARANTINED}  # refused, or reset as it died
    engine.start()
    engine.wait_ready()
    await_true(lambda: states(client) == [EngineState.LIVE] * 2, 60.0)
    again = client.generate([prompt(number) for number in range(8)], {"max_new_tokens": 8, "ignore_eos": True})
    assert {s.engine for s in again} == {status.url for status in client.engines()}
    return f"kill -9 of one of two: 32 of 32 samples {seconds:.1f} s later; restarted on its port: admitted again"


def states(client: RolloutClient) -> list[EngineState]:
    return [engine.state for engine in client.engines()]


def test_one_batch_on_a_mixed_fleet(mixed_urls: Sequence[str]) -> None:
    """Real SGLang and real vLLM serve it together: order, logprobs, an abort, the rest on whichever is free."""
    batch = [prompt(number) for number in range(32)]
    with RolloutClient(mixed_urls) as client:
        samples = client.generate(batch, {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}, n=2)
        assert [(s.index, s.member) for s in samples] == [(index, member) for index in range(32) for member in range(2)]
        assert {s.status for s in samples} == {Status.TRUNCATED}
        assert {s.engine for s in samples} == set(mixed_urls)
        check_aligned(samples)
        for sample, again in zip(samples, rescored(client, samples), strict=True):
            assert sample.logprobs is not None
            np.testing.assert_allclose(sample.logprobs, again, atol=0.2)  # by the other engine, perhaps
        assert [status.dialect for status in client.engines()] == ["sglang", "vllm"]
        cut_short(client, batch[:8])


def cut_short(client: RolloutClient, batch: Sequence[list[int]]) -> None:
    job = client.start(batch, {"max_new_tokens": 1900, "ignore_eos": True})
    await_true(lambda: all(load.running >= 1 for load in client.loads().values()), 60.0)
    report = client.abort_until_idle(30)
    assert [drain.state for drain in report.engines] == [IdleState.IDLE] * 2
    partials: list[Sample] = job.result()
    assert {s.status for s in partials} == {Status.ABORTED}
    check_aligned([s for s in partials if s.logprobs is not None])
    done = client.generate(partials, timeout=120)
    assert {s.status for s in done} == {Status.TRUNCATED}
    assert {len(s.output_ids) for s in done} == {1900}
    check_aligned(done)
