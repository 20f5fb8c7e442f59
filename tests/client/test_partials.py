"""Partials: cut, resumed, cut again; what comes out is what an uninterrupted run would have made."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest

from rolloutsync import Finish, Prompt, RolloutClient, Sample, Status, WeightSpan, load_samples, save_samples
from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.client.conftest import MakeClient
from tests.client.kit import ScriptedEngine, body_of, check_sample, completion, params, prompts
from tests.processes import run
from tests.wire import Request, Script, answer, eventually


def cut_at(client: RolloutClient, fleet: SimFleet, batch: Any, tokens: int, **options: Any) -> list[Sample]:
    """The batch, aborted as soon as every sample has at least so many tokens more."""
    job = client.start(batch, **options)
    eventually(lambda: progress(fleet) >= (len(job), tokens), f"all have {tokens} tokens")
    client.abort_until_idle(20.0)
    return job.result()


def progress(fleet: SimFleet) -> tuple[int, int]:
    """(requests that run, the fewest tokens of one of them)."""
    rows = [row for engine in fleet.engines for row in engine.state()["generations"] if row["state"] == "running"]
    return len(rows), min((row["tokens"] for row in rows), default=0)


def check_aligned(sample: Sample) -> None:
    assert sample.logprobs is not None
    assert len(sample.logprobs) == len(sample.output_ids)
    ends = [0, *(span.end for span in sample.weight_spans)]
    assert [span.start for span in sample.weight_spans] == ends[:-1]
    assert ends[-1] == len(sample.output_ids)


@pytest.fixture
def slow_fleet() -> Any:
    with SimFleet(engines=2, tokens_per_second=200.0, routed_experts=(3, 2, 8), disconnect_poll_s=0.2) as fleet:
        yield fleet


def update(fleet: SimFleet, version: str) -> None:
    for engine in fleet.engines:
        engine.call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})


def test_three_rounds_over_changing_weights(slow_fleet: SimFleet, make_client: MakeClient) -> None:
    """Tokens, logprobs, spans and experts of three versions tile the output; the budget is kept; ids are exact."""
    client = make_client(slow_fleet, routed_experts_shape=(3, 2))
    samples: list[Any] = prompts(4)
    for version in ("2", "4", "6"):
        update(slow_fleet, version)
        samples = cut_at(client, slow_fleet, samples, 5, **ROUND)
        assert {sample.status for sample in samples} == {Status.ABORTED}
        for sample in samples:
            check_aligned(sample)
    update(slow_fleet, "8")
    done = client.generate(samples, return_routed_experts=True)
    for sample, partial, ids in zip(done, samples, prompts(4), strict=True):
        check_aligned(sample)
        assert (sample.status, len(sample.output_ids)) == (Status.TRUNCATED, 200)
        assert [span.version for span in sample.weight_spans] == ["2", "4", "6", "8"]
        assert sample.output_ids[: len(partial.output_ids)].tolist() == partial.output_ids.tolist()
        context = list(ids)
        for span in sample.weight_spans:
            part = sample.output_ids[span.start : span.end].tolist()
            assert part == expected_tokens(context, len(part), version=span.version or "")
            context += part
        assert sample.prompt_tokens == len(ids)
        assert sample.attempts == 4
        whole = client.generate([context], params(1), return_routed_experts=True)[0]
        assert sample.routed_experts is not None
        assert whole.routed_experts is not None
        assert sample.routed_experts.shape == (len(context) - 1, 3, 2)
        assert np.array_equal(sample.routed_experts, whole.routed_experts[: len(context) - 1])
    assert client.audit().balanced


ROUND: dict[str, Any] = {"sampling_params": params(200), "return_routed_experts": True}


DRAINED = """
import os, signal, sys, time
from rolloutsync import RolloutClient, save_samples
from tests.client.kit import params, prompts
client = RolloutClient(sys.argv[2:], progress=False)
job = client.start([*prompts(3), "a text whose ids the engine tells"], params(2000, sampling_seed=7))
while sum(load.tokens for load in client.loads().values()) < 100:
    time.sleep(0.02)
client.abort_until_idle()
save_samples(sys.argv[1], job.result())
os.kill(os.getpid(), signal.SIGKILL)
"""
RESUMED = """
import sys
from rolloutsync import RolloutClient, load_samples, save_samples
with RolloutClient(sys.argv[2:], progress=False) as client:
    save_samples(sys.argv[1] + ".done", client.generate(load_samples(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_step_that_was_killed_goes_on_in_another_process(fleet: SimFleet, tmp_path: Path) -> None:
    """kill -9 after a drain; the saved partials, resumed by a new process, equal an uninterrupted run."""
    path = str(tmp_path / "step.npz")
    assert run(DRAINED, path, *fleet.urls).returncode == -signal.SIGKILL
    partials = load_samples(path)
    assert {sample.status for sample in partials} == {Status.ABORTED}
    assert all(0 < len(sample.output_ids) < 2000 for sample in partials)
    ended = run(RESUMED, path, *fleet.urls)
    assert ended.returncode == 0, ended.stderr
    done = load_samples(path + ".done")
    for sample, ids in zip(done, prompts(3), strict=False):
        check_sample(sample, ids, 2000, seed=7)
    told = partials[3].prompt.input_ids
    assert told is not None
    assert done[3].output_ids.tolist() == expected_tokens(told.tolist(), 2000, seed=7)


def test_a_mixed_batch(fleet: SimFleet, make_client: MakeClient) -> None:
    """Fresh, finished, partial and failed samples in one call, each in its place."""
    client = make_client(fleet)
    partial = cut_at(client, fleet, prompts(1), 3, sampling_params=params(2000))[0]
    finished = client.generate(prompts(1), params(4))[0]
    failed = replace(finished, status=Status.FAILED)
    short = replace(partial, prompt=replace(partial.prompt, sampling_params=params(len(partial.output_ids) + 5)))
    samples = client.generate([[7, 8, 9], finished, short, failed], params(4))
    assert samples[1] is finished
    check_sample(samples[0], [7, 8, 9], 4)
    check_sample(samples[2], prompts(1)[0], len(partial.output_ids) + 5)
    assert [sample.index for sample in samples] == [0, 0, 2, 3]
    check_sample(samples[3], prompts(1)[0], 4)


def made(tokens: int, budget: int | None = 100, **changes: Any) -> Sample:
    """A partial of a prompt of three ids."""
    sampling = {} if budget is None else {"max_new_tokens": budget}
    prompt = Prompt(input_ids=np.array([1, 2, 3], np.int32), sampling_params={**sampling, **changes.pop("more", {})})
    prompt = replace(prompt, fields={"return_logprob": True, **changes.pop("fields", {})})
    ids = np.arange(100, 100 + tokens, dtype=np.int32)
    logprobs = np.full(tokens, -0.5, np.float32)
    spans = (WeightSpan("1", 0, tokens),) if tokens else ()
    return replace(Sample(prompt, 0, 0, output_ids=ids, logprobs=logprobs, weight_spans=spans, attempts=1), **changes)


def test_what_is_sent(make_client: MakeClient) -> None:
    """B21: the prompt with its tokens, and what is left of the budget; the sample's own parameters are not changed."""
    given = made(60, more={"min_new_tokens": 80, "sampling_seed": 5}, fields={"logprob_start_len": 0})
    given = replace(given, prompt_logprobs=np.zeros(3, np.float32))
    with ScriptedEngine() as engine:
        sample = make_client(engine.url).generate([given, made(3, None), made(90, more={"min_new_tokens": 4})])[0]
        first, second, third = sorted(engine.bodies(), key=lambda body: -body["sampling_params"]["max_new_tokens"])[::1]
    assert first["sampling_params"] == {"max_new_tokens": 125}  # the engine's default is 128
    assert second["input_ids"] == [1, 2, 3, *range(100, 160)]
    assert second["sampling_params"] == {"max_new_tokens": 40, "min_new_tokens": 20, "sampling_seed": 5}
    assert second["logprob_start_len"] == -1  # those of the prompt are there already
    assert third["sampling_params"] == {"max_new_tokens": 10, "min_new_tokens": 0}
    assert sample.prompt.sampling_params == {"max_new_tokens": 100, "min_new_tokens": 80, "sampling_seed": 5}
    assert (len(sample.output_ids), sample.attempts) == (62, 2)


@pytest.mark.parametrize("tokens", [100, 101])
def test_a_partial_without_a_budget_is_finished_unsent(make_client: MakeClient, tokens: int) -> None:
    """B21: cut at its very last token."""
    with ScriptedEngine() as engine:
        sample = make_client(engine.url).generate([made(tokens)])[0]
        assert engine.server.paths() == []
    assert (sample.status, sample.finish, len(sample.output_ids)) == (Status.TRUNCATED, Finish(type="length"), tokens)


def test_partials_that_are_not_kept(make_client: MakeClient) -> None:
    """B22: they start over from the bare prompt."""
    with ScriptedEngine() as engine:
        samples = make_client(engine.url).generate([made(60), made(0)], keep_partials=False)
        assert [body["input_ids"] for body in engine.bodies()] == [[1, 2, 3]] * 2
        assert [body["sampling_params"]["max_new_tokens"] for body in engine.bodies()] == [100] * 2
    assert [(len(sample.output_ids), sample.attempts) for sample in samples] == [(2, 1)] * 2


@pytest.mark.parametrize(
    ("partial", "words"),
    [
        (made(5, more={"regex": "a+"}), "its grammar (regex) is lost; keep_partials=False starts it over"),
        (made(5, prompt=Prompt(text="who")), "its prompt is text, and the engine did not tell its token ids"),
    ],
)
def test_what_cannot_be_continued_is_refused(make_client: MakeClient, partial: Sample, words: str) -> None:
    """Before anything of the batch is sent."""
    with ScriptedEngine() as engine:
        with pytest.raises(ValueError, match="batch\\[1\\]: the partial of 5 tokens cannot be resumed: ") as raised:
            make_client(engine.url).generate([[1, 2], partial])
        assert words in str(raised.value)
        assert engine.server.paths() == []


def test_begun_samples_have_no_members(make_client: MakeClient) -> None:
    with pytest.raises(ValueError, match="batch\\[0\\]: a partial cannot have n=2 members"):
        make_client("http://127.0.0.1:9").generate([made(5)], n=2)


def test_penalties_warn_once(make_client: MakeClient, warnings: Callable[[], list[str]]) -> None:
    with ScriptedEngine() as engine:
        client = make_client(engine.url)
        for _ in range(2):
            client.generate([made(5, more={"presence_penalty": 0.5}), made(5, more={"repetition_penalty": 1.0})])
        assert [words[:45] for words in warnings()] == ["1 partials with penalties are resumed: engine"]


@pytest.mark.parametrize(
    ("reason", "tokens", "status"),
    [({"type": "abort", "message": "x"}, 0, Status.ABORTED), ({"type": "abort", "message": "x"}, 2, Status.ABORTED)],
)
def test_earlier_tokens_survive_every_answer(make_client: MakeClient, reason: Any, tokens: int, status: Status) -> None:
    """B20: seven earlier tokens, and none or two new ones from an abort that somebody else asked for."""

    def aborted(request: Request, number: int) -> Script:
        return [answer(completion(request, tokens, finish_reason=reason))]

    with ScriptedEngine(aborted) as engine:
        sample = make_client(engine.url).generate([made(7)])[0]
    assert (sample.status, len(sample.output_ids)) == (status, 7 + tokens)
    check_aligned(sample)


def test_an_abort_before_it_was_sent_keeps_the_tokens(make_client: MakeClient) -> None:
    with ScriptedEngine() as engine:
        client = make_client(engine.url)
        client.pause()
        job = client.start([made(7)])
        samples = job.abort()
    assert [(sample.status, len(sample.output_ids)) for sample in samples] == [(Status.ABORTED, 7)]


def test_a_failure_keeps_the_tokens(make_client: MakeClient) -> None:
    def refuses(request: Request, number: int) -> Script:
        return [answer(b"no", "400 Bad Request")]

    with ScriptedEngine(refuses) as engine:
        sample = make_client(engine.url).generate([made(7)], on_error="return")[0]
    assert (sample.status, len(sample.output_ids)) == (Status.FAILED, 7)


@pytest.mark.parametrize("honours", [True, False])
def test_rows_of_experts_are_cut(make_client: MakeClient, honours: bool) -> None:
    """Engines that obey ``routed_experts_start_len``, and those that send every row again."""
    rows = 3 + 7 + 2 - 1
    table = np.arange(rows * 2, dtype=np.int32).reshape(rows, 2, 1) % 8

    def routed(request: Request, number: int) -> Script:
        start = body_of(request)["routed_experts_start_len"]
        sent = table[start:] if honours else table
        text = pybase64.b64encode(sent.tobytes()).decode()
        return [answer(completion(request, 2, routed_experts=text, prompt_tokens=10))]

    partial = made(7, fields={"return_routed_experts": True}, routed_experts=table[:9].astype(np.int32))
    with ScriptedEngine(routed) as engine:
        client = make_client(engine.url, routed_experts_shape=(2, 1), routed_experts_dtype="int32")
        sample = client.generate([partial])[0]
        assert engine.bodies()[0]["routed_experts_start_len"] == 9
    assert sample.routed_experts is not None
    assert np.array_equal(sample.routed_experts, table)


# --- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampling_seed", "seed"])
def test_a_seed_is_spread_over_the_members(fleet: SimFleet, make_client: MakeClient, name: str) -> None:
    samples = make_client(fleet).generate(prompts(2), params(6, **{name: 40}), n=3)
    for sample in samples:
        check_sample(sample, prompts(2)[sample.index], 6, seed=40 + sample.member)


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_round_trip(fleet: SimFleet, make_client: MakeClient, tmp_path: Path) -> None:
    """Order, arrays, metadata, errors as text; an old file is replaced; nothing else is left in the folder."""
    path = tmp_path / "samples"
    client = make_client(fleet)
    samples = client.generate([{"text": "x", "metadata": {"id": [1, "é"]}}, *prompts(2)], params(3), top_logprobs_num=2)
    save_samples(path, [])
    assert load_samples(path) == []
    save_samples(str(path), [*samples, made(7)])
    loaded = load_samples(path)
    assert [one.to_dict() for one in loaded] == [one.to_dict() for one in [*samples, made(7)]]
    assert [file.name for file in tmp_path.iterdir()] == ["samples"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_samples(path, [made(7)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"file is not a whole file of samples"):
        load_samples(path)
    head = json.dumps({"format": "rolloutsync samples", "schema": 99, "count": 0})
    with path.open("wb") as file:
        np.savez(file, head=np.array(head))
    with pytest.raises(ValueError, match=r"has schema 99, this version of rolloutsync reads 1"):
        load_samples(path)
    with path.open("wb") as file:
        np.savez(file, other=np.arange(3))
    with pytest.raises(ValueError, match="is not a file of samples"):
        load_samples(path)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    """And the old file stays as it was."""
    path = tmp_path / "file"
    save_samples(path, [made(7)])
    with pytest.raises(TypeError, match=r"samples\[1\]: its metadata or meta_info is not JSON"):
        save_samples(path, [made(7), made(7, metadata={"x": object()})])
    with pytest.raises(TypeError, match=r"samples\[0\] must be a Sample, got 'x'"):
        save_samples(path, ["x"])  # type: ignore[list-item]
    assert len(load_samples(path)) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
