"""What the client takes for granted about vLLM's generations, asked of the real one: answers, ids, ends, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import requests

from .launch import RealEngine
from .raw_vllm import COMPLETIONS, GENERATE, RawVllm, answered, generation, raw_vllm

pytestmark = pytest.mark.real

PROMPT = [5, 6, 7]
CONTEXT = 2048
VOCABULARY = 512


@pytest.fixture
def engine(vllm: RealEngine) -> Iterator[RawVllm]:
    """The engine with dev mode and scale-out."""
    with raw_vllm(vllm.url) as made:
        yield made


def only(body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer."""
    (choice,) = body["choices"]
    assert choice["index"] == 0
    return dict(choice)


def greedy(engine: RawVllm, tokens: int, ids: list[int], **sampling: object) -> list[int]:
    """What the model says without chance."""
    return list(only(engine.generate(tokens=tokens, ids=ids, temperature=0, **sampling))["token_ids"])


def refused(answer: requests.Response, status: int = 400) -> str:
    """The words of an error, in the one shape that this engine has."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text}"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return str(error["message"])


def bad(engine: RawVllm, token_ids: object = PROMPT, **sampling: object) -> requests.Response:
    """The answer to a generation with something wrong."""
    body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 1, **sampling}}
    return engine.post(GENERATE, body)


# The route of tokens.


def test_an_answer_has_tokens_logprobs_and_counts_that_agree(engine: RawVllm) -> None:
    """One logprob entry per token, each of which names its token; usage counts both."""
    rid = uuid4().hex
    body = engine.generate(rid=rid, tokens=5)
    choice = only(body)
    assert body["request_id"] == f"generate-tokens-{rid}"
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("length", None, 5)
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert all(entry["logprob"] < 0 for entry in entries)
    assert choice["routed_experts"] is None
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 5, 8)
    assert (body["output_mode"], body["prompt_token_ids"], body["model"]) == ("tokens", None, "tiny")


def test_logprobs_come_only_where_they_were_asked_for(engine: RawVllm) -> None:
    """Null otherwise; 0 is enough for the chosen tokens, 2 brings the two likeliest as well."""
    assert only(engine.generate(logprobs=None))["logprobs"] is None
    (entry,) = only(engine.generate(tokens=1, logprobs=0))["logprobs"]["content"]
    assert [top["token_id"] for top in entry["top_logprobs"]] == [entry["token_id"]]
    (entry,) = only(engine.generate(tokens=1, logprobs=2, temperature=0))["logprobs"]["content"]
    assert [top["rank"] for top in entry["top_logprobs"]] == [1, 2]
    assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]


def test_logprobs_of_the_prompt_are_keyed_by_token(engine: RawVllm) -> None:
    """None for the first token; of every later one the actual token and the likeliest."""
    body = engine.generate(tokens=1, ids=[5, 6], prompt_logprobs=1)
    first, second = body["prompt_logprobs"]
    assert first is None
    assert second["6"]["logprob"] < 0
    assert 1 in {entry["rank"] for entry in second.values()}


def test_the_prompt_comes_back_on_request(engine: RawVllm) -> None:
    """`return_token_ids` is a field of the request, not of its sampling parameters."""
    answer = engine.post(GENERATE, {**generation(uuid4().hex, 1, PROMPT), "return_token_ids": True})
    assert answer.json()["prompt_token_ids"] == PROMPT


def test_the_samples_of_a_group_come_in_one_answer(engine: RawVllm) -> None:
    """With the prompt counted once; more samples than the engine runs at once are refused."""
    body = engine.generate(tokens=3, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [3, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 6)
    assert "max_num_seqs (4), got 5" in refused(bad(engine, n=5))
    assert "n must be 1 when using greedy" in refused(bad(engine, n=2, temperature=0))


def test_cached_tokens_are_whole_blocks(engine: RawVllm) -> None:
    """The second time most of a long prompt is in the cache, and usage says how much."""
    ids = [9 + number % 300 for number in range(600)]
    assert engine.post("/reset_prefix_cache").json() == {"success": True}
    cold, warm = (engine.generate(ids=ids)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2))
    assert cold == 0
    assert 400 < warm < 600


def test_every_version_of_the_weights_has_its_span(engine: RawVllm) -> None:
    """One span over all tokens where nothing changed."""
    spans = only(engine.generate(tokens=7))["weight_versions"]
    version = engine.get("/weight_info").json()["weight_version"]
    assert spans == [{"version": version, "start": 0, "end": 7}]


# The route of OpenAI.


def test_a_completion_has_ids_and_logprobs(engine: RawVllm) -> None:
    """The same tokens and the same logprobs as on the other route, in OpenAI's lists."""
    rid = uuid4().hex
    body = engine.complete(request_id=rid, logprobs=0)
    choice = only(body)
    assert body["id"] == f"cmpl-{rid}"
    assert (choice["prompt_token_ids"], choice["finish_reason"]) == (PROMPT, "length")
    other = only(engine.generate(temperature=0))
    assert choice["token_ids"] == other["token_ids"]
    values = [entry["logprob"] for entry in other["logprobs"]["content"]]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(values, abs=0.01)


def test_a_text_prompt_gives_its_token_ids_back(engine: RawVllm) -> None:
    """`return_token_ids` makes a text prompt resumable; without it there are none, of either kind."""
    choice = only(engine.complete(prompt="the rest"))
    assert choice["prompt_token_ids"] == answered_tokens(engine, "the rest")
    assert len(choice["token_ids"]) == 4
    choice = only(engine.complete(prompt="the rest", return_token_ids=False))
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == (None, None, None)


def answered_tokens(engine: RawVllm, text: str) -> list[int]:
    """The ids of a text, by the engine's own tokenizer."""
    return list(engine.post("/tokenize", {"model": "tiny", "prompt": text}).json()["tokens"])


def test_a_list_of_prompts_is_answered_prompt_by_prompt(engine: RawVllm) -> None:
    """With n samples each, in order."""
    body = engine.complete(prompt=[[5, 6, 7], [8, 9]], n=2, temperature=1)
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in body["choices"]] == [
        *((0, [5, 6, 7]), (1, [5, 6, 7]), (2, [8, 9]), (3, [8, 9]))
    ]


def test_weight_versions_are_not_told_there(engine: RawVllm) -> None:
    """This release ignores the field that later ones know."""
    assert "weight_versions" not in only(engine.complete(return_weight_versions=True))


# Ids.


def test_a_header_names_the_request_before_its_body_does(engine: RawVllm) -> None:
    """`X-Request-Id` wins, with no flag at all; and it is not echoed without one."""
    header = {"X-Request-Id": "from-the-header"}
    for path, body, key, form in (
        (GENERATE, generation("from-the-body", 1, PROMPT), "request_id", "generate-tokens-{}"),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, "request_id": "from-the-body"}, "id", "cmpl-{}"),
    ):
        answer = engine.post(path, body, header)
        assert answer.json()[key] == form.format("from-the-header")
        assert "x-request-id" not in answer.headers
        assert engine.post(path, body).json()[key] == form.format("from-the-body")


def test_a_live_id_may_be_used_again_and_its_abort_ends_both(engine: RawVllm) -> None:
    """No duplicate is refused here; hence ids that nobody else has."""
    rid = uuid4().hex
    calls = [engine.begin(rid) for _ in range(2)]
    engine.await_counts(running=2)
    engine.abort(f"generate-tokens-{rid}")
    assert [only(answered(call))["finish_reason"] for call in calls] == ["abort", "abort"]


# Ends.


def test_what_ends_a_generation(engine: RawVllm) -> None:
    """The end token, a token that was named and a text: all `stop`, told apart by the reason."""
    plain = greedy(engine, 8, PROMPT)
    end = only(engine.generate(tokens=8, ignore_eos=False, logit_bias={"2": 100}))
    assert (end["finish_reason"], end["stop_reason"], end["token_ids"]) == ("stop", None, [2])
    named = only(engine.generate(tokens=8, temperature=0, stop_token_ids=[plain[3]]))
    assert (named["finish_reason"], named["stop_reason"], named["token_ids"]) == ("stop", plain[3], plain[:4])
    text = only(engine.generate(tokens=1000, stop=["e"], detokenize=True))
    assert (text["finish_reason"], text["stop_reason"]) == ("stop", "e")
    assert len(text["logprobs"]["content"]) == len(text["token_ids"])


def test_stop_tokens_cannot_come_before_the_minimum(engine: RawVllm) -> None:
    """They are not drawn at all until then; a minimum above the maximum is refused."""
    plain = greedy(engine, 8, PROMPT)
    ids = greedy(engine, 8, PROMPT, stop_token_ids=[plain[1]], min_tokens=3)
    assert plain[1] not in ids[:3]
    assert len(ids) > 3
    assert "min_tokens must be less than or equal to max_tokens=1" in refused(bad(engine, min_tokens=2))


def test_a_seed_repeats(engine: RawVllm) -> None:
    """The same seed brings the same tokens, one after the other and beside others."""
    first = only(engine.generate(tokens=30, seed=7))["token_ids"]
    calls = [engine.begin(tokens=30, seed=7) for _ in range(3)]
    assert [only(answered(call))["token_ids"] for call in calls] == [first] * 3
    assert only(engine.generate(tokens=30, seed=8))["token_ids"] != first


def test_a_continued_prompt_goes_on_as_the_uncut_one(engine: RawVllm) -> None:
    """Without chance, prompt and output together bring the rest."""
    whole = greedy(engine, 20, PROMPT)
    assert greedy(engine, 12, PROMPT + whole[:8]) == whole[8:]


def test_a_generation_ends_at_the_context(engine: RawVllm) -> None:
    """More tokens than fit are cut and not refused; without a maximum the context is filled."""
    ids = [5] * (CONTEXT - 8)
    assert len(only(engine.generate(ids=ids, tokens=100))["token_ids"]) == 8
    answer = engine.post(GENERATE, {"token_ids": ids, "sampling_params": {"ignore_eos": True}})
    assert len(only(answer.json())["token_ids"]) == 8


# Refusals.


def test_an_unknown_parameter_is_dropped_without_a_word(engine: RawVllm) -> None:
    """So whoever asks for one has to be told by the client. SGLang's name for the maximum is such a one."""
    assert bad(engine, no_such_parameter=1).status_code == 200
    body = {"token_ids": [5] * (CONTEXT - 8), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    assert len(only(engine.post(GENERATE, body).json())["token_ids"]) == 8
    assert engine.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, "no_such_field": 1}).status_code == 200


def test_a_token_outside_the_vocabulary_is_refused(engine: RawVllm) -> None:
    """By both routes, and the engine lives on."""
    words = f"Token id {VOCABULARY} is out of vocabulary"
    assert refused(bad(engine, [5, VOCABULARY])) == words
    assert refused(engine.post(COMPLETIONS, {"prompt": [5, VOCABULARY], "max_tokens": 1})) == words
    assert "must not contain negative values" in refused(bad(engine, [5, -1]))
    assert len(greedy(engine, 2, PROMPT)) == 2


def test_a_prompt_that_does_not_fit_is_refused(engine: RawVllm) -> None:
    """So is one that leaves no room for a token."""
    assert "(length 2100) is longer than the maximum model length" in refused(bad(engine, [5] * 2100))
    assert "(length 2048) plus the number of requested output tokens" in refused(bad(engine, [5] * CONTEXT))
    assert bad(engine, [5] * (CONTEXT - 1)).status_code == 200
    words = refused(engine.post(COMPLETIONS, {"prompt": [5] * 2100, "max_tokens": 1}))
    assert "maximum context length is 2048 tokens" in words


@pytest.mark.parametrize(
    ("token_ids", "sampling", "words"),
    [
        ([], {}, "at least 1 item"),
        ([5.5], {}, "valid integer"),
        ([[5, 6]], {}, "valid integer"),
        ("text", {}, "valid list"),
        (PROMPT, {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        (PROMPT, {"max_tokens": "x"}, "unable to parse string"),
        (PROMPT, {"temperature": -1}, "temperature must be non-negative"),
        (PROMPT, {"logprobs": 50}, "greater than max allowed: 20"),
    ],
)
def test_what_else_is_refused(engine: RawVllm, token_ids: object, sampling: dict[str, object], words: str) -> None:
    """With 400 and a word that tells what was wrong."""
    assert words in refused(bad(engine, token_ids, **sampling))


def test_an_unknown_model_is_a_404_as_a_missing_route_would_be(engine: RawVllm) -> None:
    """The type tells them apart."""
    answer = engine.post(GENERATE, {**generation("x", 1, PROMPT), "model": "nope"})
    assert "The model `nope` does not exist" in refused(answer, 404)
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert engine.post("/no/such/route", {}).json() == {"detail": "Not Found"}


# What it tells of itself.


def test_what_tells_vllm_from_other_servers(engine: RawVllm) -> None:
    """A version where SGLang has none, and none of SGLang's or a router's routes."""
    assert engine.get("/version").json().keys() == {"version"}
    (model,) = engine.get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("tiny", "vllm", CONTEXT)
    for path in ("/model_info", "/get_model_info", "/v1/loads", "/get_load", "/workers", "/list_workers"):
        assert engine.get(path).status_code == 404


def test_the_model_list_names_the_checkpoint(engine: RawVllm, vllm: RealEngine) -> None:
    """Under whatever name it is served."""
    (model,) = engine.get("/v1/models").json()["data"]
    assert model["root"] == str(vllm.model)


def test_the_limits_are_in_the_server_info_as_json(engine: RawVllm) -> None:
    """The other form, the default, is one long line for people."""
    config = engine.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["scheduler_config"]["max_num_seqs"] == 4
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["max_model_len"] == CONTEXT
    assert config["aux_output_config"]["enable_return_routed_experts"] is False
    assert isinstance(engine.get("/server_info").json()["vllm_config"], str)
