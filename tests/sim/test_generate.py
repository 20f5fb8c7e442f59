"""`/generate` and what ends it, over HTTP."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
import pytest

from rolloutsync.sim import Fault
from rolloutsync.sim.tokens import expected_logprobs, expected_routed_experts, expected_tokens

from .kit import WAIT_S, Caller, events, generation, rows

PROMPT = [5, 30, 70, 100]
VOCAB = 512


def expected(prompt: list[int], count: int, **arguments: Any) -> list[int]:
    """What the engines of this suite say under their first weights."""
    return expected_tokens(prompt, count, vocab_size=VOCAB, **arguments)


@pytest.mark.slow
def test_an_answer_is_the_pure_function_of_its_request(ranks: Caller) -> None:
    """Tokens, log-probabilities and the seed are as the library's functions say."""
    reply = ranks.generate(PROMPT, 20, return_logprob=True, sampling={"sampling_seed": 7})
    assert reply.ids == expected(PROMPT, 20, seed=7)
    entries = reply.json["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == reply.ids
    assert [entry[0] for entry in entries] == expected_logprobs(PROMPT, reply.ids)


def test_an_aborted_request_can_be_resumed_token_exactly(ranks: Caller) -> None:
    """Partial output, then prompt plus output: together the whole sample."""
    call = ranks.begin_generate(PROMPT, 500, rid="cut", return_logprob=True)
    ranks.await_state(lambda state: state["tokens"] > 20, "twenty tokens")
    ranks.post("/abort_request", {"rid": "cut"})
    partial = call.result(WAIT_S)
    assert partial.finish["type"] == "abort"
    assert 20 <= len(partial.ids) < 500
    rest = ranks.generate(PROMPT + partial.ids, 100 - len(partial.ids) % 100)
    assert partial.ids + rest.ids == expected(PROMPT, len(partial.ids) + len(rest.ids))


def test_input_logprobs_score_a_sample_as_it_was_sampled(ranks: Caller) -> None:
    """Scoring prompt plus output gives the log-probabilities that sampling gave."""
    sample = ranks.generate(PROMPT, 10, return_logprob=True)
    score = ranks.generate(PROMPT + sample.ids, 0, return_logprob=True, logprob_start_len=0)
    inputs = score.json["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in inputs] == PROMPT + sample.ids
    assert inputs[0][0] is None
    assert [entry[0] for entry in inputs[-10:]] == [e[0] for e in sample.json["meta_info"]["output_token_logprobs"]]


def test_a_batch_comes_back_in_order(ranks: Caller) -> None:
    """One answer per prompt; a rid gets a number for each."""
    prompts = [[5, 6], [7, 8, 9], [10]]
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, "rid": "batch"}
    answers = ranks.post("/generate", body).json
    assert [answer["output_ids"] for answer in answers] == [expected(prompt, 4) for prompt in prompts]
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_1", "batch_2"]


def test_several_samples_are_prompt_major_and_lose_the_rid(ranks: Caller) -> None:
    """n=2 of two prompts: four answers with ids of their own."""
    params = {"max_new_tokens": 3, "ignore_eos": True, "n": 2}
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": params, "rid": ["x", "y"]}
    answers = ranks.post("/generate", body).json
    assert [answer["output_ids"] for answer in answers] == [expected([5, 6], 3)] * 2 + [expected([7, 8], 3)] * 2
    assert not {"x", "y"} & {answer["meta_info"]["id"] for answer in answers}


def test_a_text_prompt_becomes_ids_that_can_be_asked_for(ranks: Caller) -> None:
    """`return_prompt_token_ids` tells them; they lead to the same output."""
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    reply = ranks.post("/generate", {"text": "hello", "sampling_params": sampling, "return_prompt_token_ids": True})
    assert reply.ids == expected(reply.json["prompt_token_ids"], 5)


def test_a_stream_ends_with_the_whole_answer(ranks: Caller) -> None:
    """Chunks are cumulative, grow, and have no reason to finish but the last."""
    *chunks, done = events(ranks.generate(PROMPT, 30, stream=True, return_logprob=True))
    assert done == "[DONE]"
    outputs = [chunk["output_ids"] for chunk in chunks]
    assert outputs == sorted(outputs, key=len)
    assert len(outputs) > 5
    assert outputs[-1] == expected(PROMPT, 30)
    assert all(outputs[-1][: len(output)] == output for output in outputs)
    reasons = [chunk["meta_info"]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [{"type": "length", "length": 30}]


def test_a_batch_can_be_streamed(ranks: Caller) -> None:
    """Every chunk says whose it is."""
    params = {"max_new_tokens": 10, "ignore_eos": True}
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": params, "stream": True}
    *chunks, _ = events(ranks.post("/generate", body))
    last = {chunk["index"]: chunk["output_ids"] for chunk in chunks}
    assert last == {0: expected([5, 6], 10), 1: expected([7, 8], 10)}


def test_errors_in_a_stream_are_events(queue: Caller) -> None:
    """The status stays 200."""
    error, done = events(queue.generate([5] * 3000, 1, stream=True))
    assert error["error"]["code"] == 400
    assert "longer than the model's context length" in error["error"]["message"]
    assert done == "[DONE]"
    calls = [queue.begin_generate(PROMPT, 1500, rid="runs")]
    queue.await_row("runs", "running")
    calls.append(queue.begin_generate(PROMPT, 1500, rid="waits"))
    queue.await_row("waits", "waiting")
    aborted, _ = events(queue.generate(PROMPT, 5, stream=True))
    assert aborted["meta_info"]["finish_reason"]["status_code"] == 503
    queue.post("/abort_request", {"abort_all": True})
    assert [call.result(WAIT_S).finish["type"] for call in calls] == ["abort", "abort"]


@pytest.mark.slow
def test_an_end_token_stops_where_it_is_not_ignored(ranks: Caller) -> None:
    """The answer names the token; its text does not show it."""
    sampling = {"max_new_tokens": 1500, "ignore_eos": False}
    replies = [ranks.begin("/generate", {"input_ids": [5, n], "sampling_params": sampling}) for n in range(3, 9)]
    for number, call in enumerate(replies, start=3):
        reply = call.result(WAIT_S)
        assert reply.ids == expected([5, number], 1500, ignore_eos=False)
        assert reply.finish == {"type": "stop", "matched": 2}


def test_a_rid_may_be_used_again_when_it_is_free(ranks: Caller) -> None:
    """One after the other is fine, twice in one call is not."""
    assert [ranks.generate(PROMPT, 2, rid="again").status for _ in range(2)] == [200, 200]
    body = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 2}, "rid": ["a", "a"]}
    assert "Duplicate request IDs detected within the request: ['a']" in ranks.post("/generate", body).text
    assert len(rows(ranks.engine.state(), "again")) == 2


def test_an_abort_takes_a_live_rid_and_all_that_begin_with_it(main: Caller) -> None:
    """The front door wants an exact id; behind it, a prefix will do."""
    calls = {rid: main.begin_generate(PROMPT, 1500, rid=rid) for rid in ("grp-1", "grp-12", "grp-2")}
    main.await_state(lambda state: state["running"] == 3, "three running")
    assert main.post("/abort_request", {"rid": "grp-"}).status == 200
    main.post("/abort_request", {"rid": "grp-1"})
    assert {calls[rid].result(WAIT_S).finish["type"] for rid in ("grp-1", "grp-12")} == {"abort"}
    assert not calls["grp-2"].done()
    main.post("/abort_request", {"abort_all": True})
    assert calls["grp-2"].result(WAIT_S).finish["type"] == "abort"
    aborts = main.engine.state()["aborts"]
    assert (aborts["count"], aborts["abort_all"], aborts["rids"]) == (3, 1, ["grp-", "grp-1"])


def test_a_client_that_hangs_up_is_noticed_late(main: Caller) -> None:
    """Not at once, but when the engine looks again."""
    main.engine.slow_down(0.05)
    with main.unanswered(PROMPT, 1500, rid="gone"):
        main.await_row("gone", "running")
    left = time.monotonic()
    assert main.engine.state()["running"] == 1
    row = main.await_row("gone", "disconnected")
    assert 0.2 < time.monotonic() - left < 2.0
    assert row["tokens"] < 100


def test_a_running_clients_absence_shows_with_the_next_report(ranks: Caller) -> None:
    """At 400 tokens/s every fiftieth token comes long before the timer of four seconds."""
    with ranks.unanswered(PROMPT, 1500, rid="gone"):
        ranks.await_row("gone", "running")
    assert ranks.await_row("gone", "disconnected")["tokens"] < 500


def test_a_streams_client_is_missed_at_once(main: Caller) -> None:
    """Sending fails, so no timer is needed."""
    main.engine.slow_down(0.05)
    with main.unanswered(PROMPT, 1500, rid="gone", stream=True) as connection:
        assert connection.recv(10)
        main.await_row("gone", "running")
    assert main.await_row("gone", "disconnected")["tokens"] < 20


def test_a_request_sent_during_a_pause_parks_and_cannot_be_aborted(main: Caller) -> None:
    """It runs when the pause is over, as if nobody had tried."""
    main.post("/pause_generation", {"mode": "in_place"})
    call = main.begin_generate(PROMPT, 6, rid="parked")
    main.await_row("parked", "parked")
    main.post("/abort_request", {"abort_all": True})
    main.post("/abort_request", {"rid": "parked"})
    main.post("/continue_generation", {})
    assert call.result(WAIT_S).finish == {"type": "length", "length": 6}


def test_an_abort_in_a_pause_swallows_the_later_ones(main: Caller) -> None:
    """From 0.5.20 on, a request's first abort is its only one: here not even its client's hanging up ends it."""
    main.engine.slow_down(0.02)
    main.post("/pause_generation", {"mode": "in_place"})
    with main.unanswered(PROMPT, 30, rid="orphan"):
        main.await_row("orphan", "parked")
        main.post("/abort_request", {"rid": "orphan"})
    main.post("/continue_generation", {})
    assert main.await_row("orphan", "finished", "disconnected") == rows(main.engine.state(), "orphan")[-1]
    assert rows(main.engine.state(), "orphan")[-1]["tokens"] == 30


def test_routed_experts_are_those_of_the_context(main: Caller) -> None:
    """Bare int32, one row per position but the last, from where it was asked."""
    for start in (0, 3):
        reply = main.generate(PROMPT, 9, return_routed_experts=True, routed_experts_start_len=start)
        raw = base64.b64decode(reply.json["meta_info"]["routed_experts"], validate=True)
        got = np.frombuffer(raw, np.int32).reshape(-1, 2, 2)
        want = expected_routed_experts(PROMPT, reply.ids, layers=2, topk=2, num_experts=8, start_len=start)
        assert np.array_equal(got, want)
    late = main.generate(PROMPT, 9, return_routed_experts=True, routed_experts_start_len=5)
    assert late.status == 400


def test_hidden_states_come_where_they_are_switched_on(queue: Caller) -> None:
    """The prompt's rows in one piece, then one per decoded token; newer engines take no other wish here."""
    states = queue.generate(PROMPT, 4, return_hidden_states=True).json["meta_info"]["hidden_states"]
    assert [len(states[0]), len(states) - 1, len(states[-1])] == [4, 3, 3]
    assert queue.generate(PROMPT, 4, return_hidden_states="last").status == 400


def test_a_wanted_rank_is_used_and_told(ranks: Caller) -> None:
    """The default takes turns."""
    wanted = {ranks.generate(PROMPT, 1, routed_dp_rank=1).json["meta_info"]["dp_rank"] for _ in range(2)}
    turns = {ranks.generate(PROMPT, 1).json["meta_info"]["dp_rank"] for _ in range(2)}
    assert (wanted, turns) == ({1}, {0, 1})


def test_cached_tokens_grow_with_a_known_prompt(main: Caller) -> None:
    """The second sample of a prompt computes its last token only."""
    prompt = list(range(200, 240))
    main.post("/flush_cache")
    cached = [main.generate(prompt, 2).json["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 39]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": ["a"], "rid": ["x", "y"]}, "rids length mismatch"),
        ({"input_ids": [5], "rid": 3}, "'rid'"),
        ({"input_ids": [5], "stream": None}, "'stream'"),
        ({"input_ids": [5], "logprob_start_len": 2, "return_logprob": True}, "logprob_start_len=2 is higher than"),
        ({"input_ids": [5], "sampling_params": {"n": 2}, "top_logprobs_num": [1]}, "Cannot use list top_logprobs_num"),
        ({"input_ids": [5], "sampling_params": {"stop": ["a"] * 33}}, "at most 32 stop strings"),
        ({"input_ids": [5], "sampling_params": {"stop": 5}}, "invalid type: integer `5`, expected a value or an array"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 2.5}}, "floating point `2.5`, expected i64"),
        ({"input_ids": [5], "sampling_params": {"ignore_eos": 1}}, "integer `1`, expected a boolean"),
        ({"input_ids": [5], "sampling_params": {"logit_bias": [1]}}, "sequence, expected a map"),
        ({"input_ids": [[5], 6]}, "elements must be int or list"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p must be in"),
        ({"input_ids": [5], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens must be"),
        ({"input_ids": [5], "sampling_params": {"sampling_seed": "s"}}, 'string \\"s\\", expected i64'),
        ({"input_ids": [5], "token_ids_logprob": [999]}, "out-of-vocabulary token id 999"),
        ([], "valid dictionary"),
    ],
)
def test_what_cannot_be_right_is_a_400(main: Caller, body: Any, words: str) -> None:
    """In the engine's words; nothing was started."""
    reply = main.post("/generate", body)
    assert reply.status == 400
    assert words in reply.text
    assert all(row["tokens"] == 0 for row in main.engine.state()["generations"])


def test_one_refused_item_fails_its_batch(queue: Caller) -> None:
    """The others are aborted."""
    body = {"input_ids": [[5], [6], [7], [8]], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    assert queue.post("/generate", body).status == 503
    queue.await_state(lambda state: not state["running"] and not state["waiting"], "no leftover")


def test_the_ledger_knows_every_generation(main: Caller) -> None:
    """Who, how long, how far, how it ended: enough to prove that nothing ran twice."""
    main.generate(PROMPT, 5, rid="done")
    call = main.begin_generate(PROMPT, 1500, rid="running")
    main.await_row("running", "running")
    main.engine.add_fault(Fault(kind="status", status=500, rid="never"))
    assert main.generate(PROMPT, 5, rid="never").status == 500
    state = main.engine.state()
    assert rows(state, "done")[0] | {"prompt_hash": ""} == {
        "rid": "done",
        "prompt_tokens": 4,
        "prompt_hash": "",
        "state": "finished",
        "tokens": 5,
    }
    assert rows(state, "never") == []
    assert (state["started"], state["requests"]["/generate"], state["peak_running"]) == (2, 3, 1)
    assert state["busy_seconds"] > 0
    main.post("/abort_request", {"rid": "running"})
    assert call.result(WAIT_S).finish["type"] == "abort"
    assert rows(main.engine.state(), "running")[0]["state"] == "aborted"


def test_bodies_are_generated_by_one_helper() -> None:
    """The suite's own helper does what its tests rely on."""
    assert generation([5], 3, sampling={"n": 2}, rid="r") == {
        "input_ids": [5],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "n": 2},
        "rid": "r",
    }
