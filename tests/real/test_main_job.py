"""The main job, end to end: generate on two engines, abort until idle. Runs on real SGLang and on the simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import requests

from rolloutsync import IdleState, Job, RolloutClient, Sample, Status, Timeouts

COUNTS = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens")
SLOW_S = 0.1  # a token
LONG = {"max_new_tokens": 1000, "ignore_eos": True}


def prompt(number: int) -> list[int]:
    """A prompt of its own length, whose ids no other prompt of the batch begins with."""
    return [10 + number, *((7 * number + 3 * k) % 400 + 20 for k in range(3 + number % 11))]


@pytest.fixture
def client(llama_urls: Sequence[str]) -> Iterator[RolloutClient]:
    with RolloutClient(llama_urls) as made:
        yield made


@pytest.fixture
def one(llama_urls: Sequence[str]) -> Iterator[RolloutClient]:
    """A client of a single engine that runs four requests and is sent eight."""
    with RolloutClient(llama_urls[0], engine_concurrency=8) as made:
        yield made


def slow_down(client: RolloutClient, seconds: float) -> None:
    client.control("/slow_down", {"forward_sleep_time": seconds})


def raw_counts(url: str) -> list[int]:
    """What the engine itself says, asked without our client."""
    with requests.Session() as session:
        session.trust_env = False
        rank = session.get(f"{url}/v1/loads", timeout=10).json()["loads"][0]
    return [int(rank[name]) for name in COUNTS]


def await_true(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll an engine's own word until it shows what the test needs."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the engine never came into the state that this test needs"
        time.sleep(0.01)


def await_load(client: RolloutClient, shows: Callable[[Any], bool]) -> None:
    await_true(lambda: all(shows(load) for load in client.loads().values()))


def check_aligned(samples: list[Sample]) -> None:
    for sample in samples:
        assert sample.logprobs is not None
        assert len(sample.output_ids) == len(sample.logprobs)
        assert [span.start for span in sample.weight_spans] == [0, *(span.end for span in sample.weight_spans)][:-1]
        assert sum(span.end - span.start for span in sample.weight_spans) == len(sample.output_ids)


def rescored(client: RolloutClient, samples: list[Sample]) -> list[np.ndarray[Any, Any]]:
    """The engine's own logprobs of each sample's output, read off as part of a prompt."""
    batch = [{"input_ids": s.tokens, "logprob_start_len": len(s.tokens) - len(s.output_ids) - 1} for s in samples]
    scored = client.generate(batch, {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True})
    found = []
    for sample, again in zip(samples, scored, strict=True):
        assert again.prompt_logprobs is not None
        found.append(again.prompt_logprobs[-len(sample.output_ids) :])
    return found


def test_64_prompts_x_2_on_two_engines(client: RolloutClient, llama_urls: Sequence[str]) -> None:
    """Every sample comes back, in order, with logprobs that are its own."""
    batch = [prompt(number) for number in range(64)]
    samples = client.generate(batch, {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}, n=2)
    assert [(s.index, s.member) for s in samples] == [(index, member) for index in range(64) for member in range(2)]
    assert {s.status for s in samples} == {Status.TRUNCATED}
    for sample in samples:
        assert sample.prompt.input_ids is not None
        assert sample.prompt.input_ids.tolist() == batch[sample.index]
        assert sample.prompt_tokens == len(batch[sample.index])
        assert sample.meta_info["id"] == sample.rid
        assert len(sample.output_ids) == 8
    check_aligned(samples)
    assert len({s.rid for s in samples}) == 128
    assert {s.engine for s in samples} == set(llama_urls)
    assert {s.attempts for s in samples} == {1}
    for sample, again in zip(samples, rescored(client, samples), strict=True):
        assert sample.logprobs is not None
        np.testing.assert_allclose(sample.logprobs, again, atol=0.15)  # bfloat16: prefill and decode round apart
    stats = client.stats()
    assert (stats.admitted, stats.truncated, stats.open, stats.failed) == (256, 256, 0, 0)


def test_greedy_repeats(client: RolloutClient) -> None:
    """The same prompt at temperature 0, alone on engines with empty caches, gives the same tokens."""
    runs = []
    for _ in range(2):
        client.abort_until_idle(30)
        client.flush_cache()
        runs.append(client.generate([prompt(1)], {"temperature": 0, "max_new_tokens": 12})[0].output_ids.tolist())
    assert runs[0] == runs[1]


def test_16_slow_generations_aborted_until_idle(client: RolloutClient, llama_urls: Sequence[str]) -> None:
    """An abort in the middle of generation: partials with logprobs, and idle by the engines' own word."""
    slow_down(client, SLOW_S)
    job = client.start([prompt(number) for number in range(16)], LONG)
    await_load(client, lambda load: load.running == 4)
    report = client.abort_until_idle(30)
    assert report.idle
    assert [drain.state for drain in report.engines] == [IdleState.IDLE] * 2
    assert all(drain.aborts >= 1 for drain in report.engines)
    for url in llama_urls:
        assert raw_counts(url) == [0] * len(COUNTS)
    samples = job.result()
    assert {s.status for s in samples} == {Status.ABORTED}
    assert all(s.finish is not None and s.finish.type == "abort" for s in samples if s.engine is not None)
    assert sum(len(s.output_ids) > 0 for s in samples) >= 4
    check_aligned([s for s in samples if s.logprobs is not None])
    assert client.stats().open == 0


def test_idle_engines_are_not_aborted(client: RolloutClient) -> None:
    """A drain of idle engines sends no abort: some versions die of it."""
    client.generate([prompt(5)], {"max_new_tokens": 2})
    report = client.abort_until_idle(30)
    assert report.idle
    assert sum(drain.aborts for drain in report.engines) == 0


def test_long_prompt_caught_in_prefill(one: RolloutClient, llama_urls: Sequence[str]) -> None:
    """A request in prefill is in no queue; the drain sees its tokens and ends it all the same."""
    slow_down(one, 0.4)  # seconds for each chunk of 256 tokens
    job = one.start([[11 + k % 300 for k in range(1800)]], {"max_new_tokens": 200, "ignore_eos": True})
    await_load(one, lambda load: load.running == 0 and load.waiting == 0 and load.tokens > 0)
    report = one.abort_until_idle(30)
    assert report.idle
    assert raw_counts(llama_urls[0]) == [0] * len(COUNTS)
    (sample,) = job.result()
    assert sample.status is Status.ABORTED
    assert len(sample.output_ids) < 10
    check_aligned([sample])


def test_queued_requests_aborted(one: RolloutClient) -> None:
    """Requests that the engine had only queued come back empty, as partials that are no errors."""
    slow_down(one, SLOW_S)
    job = one.start([prompt(number) for number in range(8)], LONG)
    await_load(one, lambda load: load.running == 4 and load.waiting == 4)
    assert one.abort_until_idle(30).idle
    samples = job.result()
    assert {s.status for s in samples} == {Status.ABORTED}
    queued = [s for s in samples if s.finish is not None and s.finish.message == "Abort in waiting queue"]
    assert len(queued) == 4
    assert all(len(s.output_ids) == 0 and s.error is None for s in queued)
    check_aligned(samples)


def test_own_scope_leaves_others_alone(llama_urls: Sequence[str], client: RolloutClient) -> None:
    """A job that is left early aborts its own requests; another client's on the same engine run on."""
    slow_down(client, 0.02)
    with RolloutClient(llama_urls[0]) as evaluation:
        other = evaluation.start([prompt(40)], {"max_new_tokens": 60, "ignore_eos": True})
        with client.start([prompt(41), prompt(42)], LONG) as job:
            await_true(lambda: sum(load.running for load in client.loads().values()) >= 2)
        assert [s.status for s in job.partials] == [Status.ABORTED] * 2
        (kept,) = other.result()
    assert kept.status is Status.TRUNCATED
    assert len(kept.output_ids) == 60


def test_pause_holds_requests_back(client: RolloutClient) -> None:
    """Between pause and resume nothing is sent; afterwards everything runs, once."""
    client.pause("in_place")
    job: Job = client.start([prompt(number) for number in range(4)], {"max_new_tokens": 4, "ignore_eos": True})
    assert not job.wait(0.5)
    assert client.stats().gate == "hold"
    assert sum(engine.in_flight for engine in client.engines()) == 0
    client.resume()
    samples = job.result()
    assert [s.status for s in samples] == [Status.TRUNCATED] * 4
    assert [s.attempts for s in samples] == [1] * 4


def test_drain_ends_our_own_pause(client: RolloutClient) -> None:
    """A paused engine's load stands still: the drain continues it first, and then proves it idle."""
    slow_down(client, SLOW_S)
    job = client.start([prompt(number) for number in range(4)], LONG)
    await_true(lambda: sum(load.running for load in client.loads().values()) == 4)
    client.pause("in_place")
    try:
        assert client.abort_until_idle(30).idle
    finally:
        client.resume()
    assert [s.status for s in job.result()] == [Status.ABORTED] * 4


def test_a_bad_prompt_fails_alone(client: RolloutClient) -> None:
    """The engine's own words come back for the sample that it refused; its neighbours complete."""
    batch = [prompt(1), [5] * 3000, prompt(2)]
    samples = client.generate(batch, {"max_new_tokens": 4, "ignore_eos": True})
    assert [s.status for s in samples] == [Status.TRUNCATED, Status.FAILED, Status.TRUNCATED]
    assert "longer than the model's context length" in str(samples[1].error)
    assert samples[1].attempts == 1


def test_routed_experts(moe_urls: Sequence[str], engine_kind: str) -> None:
    """One row for each token but the last: layers x topk expert ids, in the narrowest dtype."""
    shape = None if engine_kind == "real" else (2, 2)  # a real engine's config.json is readable here
    with RolloutClient(moe_urls, routed_experts_shape=shape) as client:
        samples = client.generate(
            [prompt(number) for number in range(6)],
            {"max_new_tokens": 8, "ignore_eos": True},
            n=2,
            return_routed_experts=True,
        )
    for sample in samples:
        experts = sample.routed_experts
        assert experts is not None
        assert experts.shape == (len(sample.tokens) - 1, 2, 2)
        assert experts.dtype == (np.uint8 if engine_kind == "real" else np.int32)
        assert experts.flags.owndata
        assert 0 <= int(experts.min()) <= int(experts.max()) < 8
        assert (experts[:, :, 0] != experts[:, :, 1]).all()  # top 2 of 8 are two different experts


def test_routed_experts_of_an_aborted_sample(moe_urls: Sequence[str]) -> None:
    """A partial has its rows too."""
    with RolloutClient(moe_urls, routed_experts_shape=(2, 2), timeouts=Timeouts(control_s=10)) as client:
        slow_down(client, SLOW_S)
        job = client.start([prompt(3)], LONG, return_routed_experts=True)
        await_load(client, lambda load: load.running == 1)
        assert client.abort_until_idle(30).idle
        (sample,) = job.result()
    assert sample.status is Status.ABORTED
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (len(sample.tokens) - 1, 2, 2)
