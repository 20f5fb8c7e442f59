"""What a simulated vLLM engine generates, in its two forms."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from rolloutsync.sim.tokenizer import Tokenizer
from rolloutsync.sim.tokens import (
    EOS_TOKEN_ID,
    expected_logprobs,
    expected_routed_experts,
    expected_tokens,
    prefix_hashes,
    text_key,
    top_logprobs,
)

from .kit import WAIT_S, Reply, events, until
from .vllm_kit import COMPLETIONS, GENERATE, VllmCaller, asked, choice, ids, problem

PROMPT = [5, 30, 70]
WORDS = Tokenizer(512)


def expected(count: int, seed: int = 0) -> list[int]:
    """What the model says after the prompt."""
    return expected_tokens(PROMPT, count, seed=seed, vocab_size=512)


def experts(reply: Reply) -> np.ndarray[Any, Any]:
    """The routed experts of the first sample."""
    array: np.ndarray[Any, Any] = np.load(io.BytesIO(base64.b64decode(choice(reply)["routed_experts"])))
    return array


@pytest.mark.slow
def test_it_says_what_the_model_says(vllm: VllmCaller) -> None:
    """The same tokens and log-probabilities as under SGLang's face: a fleet of both agrees."""
    reply = vllm.tokens(PROMPT, 9, sampling={"logprobs": 2})
    content = choice(reply)["logprobs"]["content"]
    assert ids(reply) == [each["token_id"] for each in content] == expected(9)
    assert [each["logprob"] for each in content] == expected_logprobs(PROMPT, expected(9))
    assert all(each["top_logprobs"][0]["token_id"] == each["token_id"] for each in content)
    assert {len(each["top_logprobs"]) for each in content} <= {2, 3}
    assert choice(reply)["finish_reason"] == "length"


def test_further_samples_have_further_seeds(vllm: VllmCaller) -> None:
    """Each of `n` as if it had been asked for with the next seed."""
    reply = vllm.tokens(PROMPT, 6, sampling={"n": 3, "seed": 7})
    assert [ids(reply, index) for index in range(3)] == [expected(6, seed) for seed in (7, 8, 9)]
    assert [each["index"] for each in reply.json["choices"]] == [0, 1, 2]
    assert reply.json["usage"]["prompt_tokens"] == len(PROMPT)
    assert reply.json["usage"]["completion_tokens"] == 18


def test_a_completion_says_the_same(vllm: VllmCaller) -> None:
    """By text, or with tokens told by their ids; 16 of them unless it is said how many."""
    reply = vllm.complete(PROMPT, ignore_eos=True, logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True)
    assert ids(reply) == expected(16)
    logprobs = choice(reply)["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in expected(16)]
    assert logprobs["token_logprobs"] == expected_logprobs(PROMPT, expected(16))
    assert [list(each) for each in logprobs["top_logprobs"]] == [[name] for name in logprobs["tokens"]]
    assert choice(reply)["text"] == WORDS.decode(expected(16))
    assert choice(reply)["prompt_token_ids"] == PROMPT


def test_completions_by_text_batches_and_echoes(vllm: VllmCaller) -> None:
    """Prompt by prompt, the samples of each together."""
    texts = [WORDS.decode(PROMPT), " bo"]
    reply = vllm.complete(texts, max_tokens=3, n=2, echo=True, ignore_eos=True, return_token_ids=True)
    assert [ids(reply, index) for index in (0, 1)] == [expected(3)] * 2
    assert [each["text"].startswith(texts[place // 2]) for place, each in enumerate(reply.json["choices"])] == [
        True
    ] * 4
    assert choice(reply, 2)["prompt_token_ids"] == WORDS.encode(texts[1])


@pytest.mark.parametrize("body", [asked([5] * 2040, None), asked([5] * 2040, 500)])
def test_tokens_go_on_to_the_end_of_the_context(vllm: VllmCaller, body: dict[str, Any]) -> None:
    """Where no limit is given, and where it is too high."""
    assert len(ids(vllm.post(GENERATE, body))) == 8


def test_a_completion_without_limit_goes_on_to_the_end(vllm: VllmCaller) -> None:
    """Null is no limit; leaving it away is 16."""
    fields = {"ignore_eos": True, "return_token_ids": True}
    assert len(ids(vllm.complete([5] * 2040, max_tokens=None, **fields))) == 8
    assert len(ids(vllm.complete([5] * 2040, **fields))) == 8


def test_the_header_names_a_request(vllm: VllmCaller) -> None:
    """Before the field; a request without either gets sixteen hex digits."""
    named = vllm.call("POST", GENERATE, asked(PROMPT, 1, request_id="field"), {"X-Request-Id": "head"})
    assert named.json["request_id"] == "generate-tokens-head"
    assert named.headers["x-request-id"] == "head"
    assert vllm.tokens(PROMPT, 1, request_id="field").json["request_id"] == "generate-tokens-field"
    completion = vllm.call("POST", COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1}, {"X-Request-Id": "head"})
    assert completion.json["id"] == "cmpl-head"
    name = vllm.complete(PROMPT, max_tokens=1).json["id"].removeprefix("cmpl-")
    assert (len(name), int(name, 16) >= 0) == (16, True)
    assert [row["rid"] for row in vllm.engine.state()["generations"][:3]] == ["head", "field", "head"]


def test_two_requests_may_have_one_name(vllm: VllmCaller) -> None:
    """And are aborted together."""
    calls = [vllm.begin_tokens(PROMPT, 1900, request_id="twin") for _ in range(2)]
    vllm.await_state(lambda state: state["running"] == 2, "both run")
    assert vllm.abort("generate-tokens-twin") == 1
    assert {choice(call.result(WAIT_S))["finish_reason"] for call in calls} == {"abort"}


def test_stops_are_told(vllm: VllmCaller) -> None:
    """A token id counts with `ignore_eos`, too; the end token is no reason to be told."""
    third = expected(3)[2]
    by_id = choice(vllm.tokens(PROMPT, 9, sampling={"stop_token_ids": [third]}))
    assert (by_id["finish_reason"], by_id["stop_reason"], by_id["token_ids"]) == ("stop", third, expected(3))
    word = WORDS.decode(expected(9)[4:5])
    by_text = choice(vllm.complete(PROMPT, max_tokens=9, ignore_eos=True, stop=[word], return_token_ids=True))
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", word)
    assert word not in by_text["text"]
    assert word in WORDS.decode(by_text["token_ids"])
    ended = choice(vllm.tokens(PROMPT, 2000, sampling={"ignore_eos": False, "min_tokens": 3, "seed": 3}))
    assert (ended["finish_reason"], ended["stop_reason"], ended["token_ids"][-1]) == ("stop", None, EOS_TOKEN_ID)


def test_routed_experts_are_a_file_of_the_narrowest_type(vllm: VllmCaller) -> None:
    """One row per token but the last; of 300 experts in sixteen bits; the prompt's first rows on demand only."""
    whole = experts(vllm.tokens(PROMPT, 4))
    wanted = expected_routed_experts(PROMPT, expected(4), layers=2, topk=2, num_experts=300)
    assert (whole.dtype, whole.tolist()) == (np.uint16, wanted.tolist())
    assert experts(vllm.tokens(PROMPT, 4, sampling={"routed_experts_prompt_start": 2})).tolist() == whole[2:].tolist()
    assert experts(vllm.complete(PROMPT, max_tokens=4, ignore_eos=True)).tolist() == whole.tolist()


def test_cached_tokens_are_told_on_demand(vllm: VllmCaller) -> None:
    """Whole blocks of sixteen, and never the last token of the prompt; nothing after a reset."""
    vllm.post("/reset_prefix_cache")
    told = [vllm.tokens(PROMPT * 16, 2).json["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert [each["cached_tokens"] for each in told] == [0, 32]


def test_spans_tell_which_weights_said_what(vllm: VllmCaller) -> None:
    """Also in completions that ask for it."""
    calls = [
        vllm.begin_running(PROMPT, "spans"),
        vllm.begin(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1900, "return_weight_versions": True}),
    ]
    vllm.await_state(lambda state: state["running"] == 2, "both run")
    vllm.post("/update_weight_version", {"new_version": "8"})
    first = len(vllm.engine.state()["generations"])
    vllm.await_state(lambda state: state["tokens"] > 40 * first, "more tokens")
    vllm.abort()
    for call in calls:
        spans = choice(call.result(WAIT_S))["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "8"]
        assert spans[0]["start"] == 0 < spans[0]["end"] == spans[1]["start"] < spans[1]["end"]


def test_a_stream_is_the_whole_in_pieces(vllm: VllmCaller) -> None:
    """Tokens and texts are what is new; a last event counts if that was asked for."""
    got = events(vllm.tokens(PROMPT, 12, stream=True, stream_options={"include_usage": True}))
    assert [token for event in got[:-2] for token in event["choices"][0]["token_ids"]] == expected(12)
    assert got[-2]["usage"]["completion_tokens"] == 12
    assert got[-2]["choices"] == []
    assert got[-3]["choices"][0]["finish_reason"] == "length"
    words = events(vllm.complete(PROMPT, max_tokens=12, ignore_eos=True, stream=True, logprobs=0))
    assert "".join(event["choices"][0]["text"] for event in words[:-1]) == WORDS.decode(expected(12))
    told = [value for event in words[:-1] for value in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert told == expected_logprobs(PROMPT, expected(12))


@pytest.mark.parametrize(
    ("sampling", "words", "param"),
    [
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)", "top_p"),
        (
            {"temperature": -1},
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "temperature",
        ),
        ({"min_tokens": 9}, "min_tokens must be less than or equal to max_tokens=4, got 9.", None),
        ({"n": 0}, "n must be at least 1, got 0.", None),
        ({"n": 65}, "sampling_params.n must be at most the server's max_num_seqs (64), got 65.", None),
        ({"stop": [""]}, "stop cannot contain an empty string.", None),
        ({"stop": ["a"], "detokenize": False}, "stop strings are only supported when detokenize is True.", None),
        (
            {"routed_experts_prompt_start": 4},
            "routed_experts_prompt_start must be between 0 and the prompt",
            "routed_experts_prompt_start",
        ),
    ],
)
def test_values_out_of_range_are_refused(
    vllm: VllmCaller, sampling: dict[str, Any], words: str, param: str | None
) -> None:
    """In the engine's own words."""
    reply = vllm.tokens(PROMPT, 4, sampling=sampling)
    assert problem(reply) == (400, "BadRequestError", param)
    assert reply.json["error"]["message"].startswith(words)


NOT_SAMPLING = "'type': 'is_instance_of', 'loc': 'body.sampling_params'"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", "body", "'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'"),
        ([], "body", "'msg': 'Input should be a valid dictionary or object to extract fields from'"),
        (asked(["x"], 4), "body.token_ids.0", "'type': 'int_parsing'"),  # type: ignore[list-item]
        (asked([], 4), "body.token_ids", "'msg': 'List should have at least 1 item after validation, not 0'"),
        (asked([5, -1], 4), "body.token_ids", "Value error, token_ids must not contain negative values"),
        (asked(PROMPT, 4, sampling={"top_p": None}), "body.sampling_params", NOT_SAMPLING),
        (asked(PROMPT, 4, sampling={"top_p": None}), "body.sampling_params", "'loc': 'body.sampling_params.top_p'"),
        (asked(PROMPT, 4, sampling={"seed": "x"}), "body.sampling_params", "unable to parse string as an integer"),
        (asked(PROMPT, 4, sampling={"stop_token_ids": [None]}), "body.sampling_params", "stop_token_ids.0', 'msg'"),
    ],
)
def test_wrong_shapes_are_refused(vllm: VllmCaller, body: Any, param: str, words: str) -> None:
    """In another form of words, with the place: as a real 0.32 answered the same bodies."""
    reply = vllm.post(GENERATE, body)
    assert problem(reply) == (400, "Bad Request", param)
    assert words in reply.json["error"]["message"]


def test_only_json_is_taken(vllm: VllmCaller) -> None:
    """By the header, not by the look of it."""
    reply = vllm.call("POST", GENERATE, asked(PROMPT, 1), {"Content-Type": "text/plain"})
    assert problem(reply) == (400, "Bad Request", None)


def test_what_the_engine_refuses_comes_in_the_stream(vllm: VllmCaller) -> None:
    """Which had begun with a 200 before; what the API server refuses does not."""
    late = events(vllm.tokens([5, 512], 4, stream=True))
    assert (late[0]["error"]["message"], late[1]) == ("Token id 512 is out of vocabulary", "[DONE]")
    assert problem(vllm.tokens(PROMPT, 4, stream=True, sampling={"top_p": 0}))[0] == 400
    vllm.post("/pause")
    assert events(vllm.tokens(PROMPT, 4, stream=True))[0]["error"]["code"] == 503


def test_a_text_can_be_had_without_asking_for_a_completion(vllm: VllmCaller) -> None:
    """With log-probabilities in the form of chats; other modes are none."""
    reply = vllm.tokens(PROMPT, 3, output_mode="text", sampling={"logprobs": 0})
    assert (reply.json["output_mode"], choice(reply)["text"]) == ("text", WORDS.decode(expected(3)))
    told = choice(reply)["logprobs"]["content"]
    assert [bytes(each["bytes"]).decode() for each in told] == [each["token"] for each in told]
    assert problem(vllm.tokens(PROMPT, 3, output_mode="song"))[0] == 400


def test_numbers_may_be_strings(vllm: VllmCaller) -> None:
    """The real engine is lenient there."""
    body = {"token_ids": ["5", 30, "70"], "sampling_params": {"max_tokens": "4", "seed": "7", "ignore_eos": True}}
    assert ids(vllm.post(GENERATE, body)) == expected(4, 7)


def test_what_is_no_token_is_refused_and_kills_nobody(vllm: VllmCaller) -> None:
    """Unlike SGLang, which dies of it."""
    for reply in (vllm.tokens([5, 512], 4), vllm.complete([5, 512])):
        assert problem(reply) == (400, "BadRequestError", None)
        assert reply.json["error"]["message"] == "Token id 512 is out of vocabulary"
    assert vllm.get("/health").status == 200


def test_prompts_that_fill_the_context_are_refused(vllm: VllmCaller) -> None:
    """In other words in either form; so are completions of nothing."""
    for prompt in ([5] * 2048, [5] * 3000):
        assert problem(vllm.tokens(prompt, 4)) == (400, "BadRequestError", None)
    assert problem(vllm.complete([5] * 2048)) == (400, "BadRequestError", "max_tokens")
    assert problem(vllm.complete([5] * 3000)) == (400, "BadRequestError", "input_tokens")
    assert problem(vllm.complete([])) == problem(vllm.complete([[5], []])) == (400, "BadRequestError", None)
    assert problem(vllm.complete("")) == (400, "BadRequestError", "prompt")


def test_a_sampling_parameter_that_it_does_not_know_is_passed_over(vllm: VllmCaller) -> None:
    """In silence, and so are SGLang's names."""
    strange = {"max_new_tokens": 2, "sampling_seed": 5, "no_such_thing": 1}
    assert ids(vllm.tokens(PROMPT, 4, sampling=strange)) == expected(4)
    assert ids(vllm.complete(PROMPT, max_tokens=4, ignore_eos=True, return_token_ids=True, **strange)) == expected(4)


def test_the_likeliest_tokens_are_those_of_the_model(vllm: VllmCaller) -> None:
    """Behind the sampled one, ranked."""
    reply = vllm.tokens(PROMPT, 1, sampling={"logprobs": 3})
    top = choice(reply)["logprobs"]["content"][0]["top_logprobs"]
    others = [each for each in top if each["token_id"] != expected(1)[0]]
    values, tokens = top_logprobs(prefix_hashes(PROMPT)[-1:], 3, text_key("default"), 512)
    assert [each["token_id"] for each in others] == [token for token in tokens[0] if token != expected(1)[0]]
    assert {each["logprob"] for each in others} <= set(values[0])
    assert [each["rank"] for each in others] == sorted(each["rank"] for each in others)


def test_a_rank_is_chosen_by_header(ranked: VllmCaller) -> None:
    """A rank out of range is refused; what is no number is passed over. The metrics tell the ranks apart."""
    key = {"Authorization": "Bearer user"}
    with ranked.wire(asked(PROMPT, 1900), {**key, "X-data-parallel-rank": "1"}):
        until(lambda: (ranked.counts(0), ranked.counts(1)), lambda seen: seen == ((0, 0), (1, 0)), "rank 1 at work")
    until(lambda: ranked.counts(1), lambda seen: seen == (0, 0), "rank 1 idle: its client has gone")
    reply = ranked.call("POST", GENERATE, asked(PROMPT, 1), {**key, "X-data-parallel-rank": "2"})
    assert reply.json["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."
    assert ranked.call("POST", GENERATE, asked(PROMPT, 1), {**key, "X-data-parallel-rank": "x"}).status == 200
