"""What vLLM is sent for a sample, by either route, and what it lacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.dialects.base import Call, Dialect, Facts, Vocabulary
from rolloutsync.dialects.common import Common
from rolloutsync.dialects.sampling import OFFSET
from rolloutsync.dialects.sglang import SAMPLING_RULES, SGLangDialect
from rolloutsync.dialects.vllm import VLLMDialect
from rolloutsync.dialects.vllm_sampling import OWN_RULES, resumed_seed
from rolloutsync.errors import UnsupportedError
from rolloutsync.sample import Prompt

from .makers import ids
from .vllm_recorded import recorded

_VLLM, _SGLANG, _COMMON = VLLMDialect(), SGLangDialect(), Common()
_DIALECTS: tuple[Dialect, ...] = (_VLLM, _SGLANG)
_VOCABULARY: Vocabulary = _COMMON
_TOKENS, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_NEW, _OLD = Facts(version="0.33.0"), Facts(version="0.24.0")
_GENERATE, _COMPLETE = (Call(method="POST", path=path) for path in (_TOKENS, _COMPLETIONS))


def _call(prompt: Prompt, facts: Facts = _NEW, route: str | None = None, dp_rank: int | None = None) -> Call:
    return _VLLM.encode_generate(prompt, "r", facts=facts, dp_rank=dp_rank, route=route)


def _body(prompt: Prompt, facts: Facts = _NEW, route: str | None = None) -> Any:
    return json.loads(_call(prompt, facts, route).body or b"")


def _sent(params: Any, route: str = _TOKENS) -> Any:
    """The user's sampling parameters as they go out."""
    body = _body(_prompt(sampling_params=_COMMON.check_sampling(params)), route=route)
    return body["sampling_params"] if route == _TOKENS else body


def _prompt(**more: Any) -> Prompt:
    return Prompt(**{"input_ids": ids(1, 2, 3), **more})


# --- routes -----------------------------------------------------------------------------------------------------------


def test_routes() -> None:
    """Tokens first; completions where the answer would not say whose it is, and for text."""
    prompt = _prompt()
    assert _VLLM.generate_routes(prompt, _NEW) == (_TOKENS, _COMPLETIONS)
    assert _VLLM.generate_routes(prompt, Facts()) == (_TOKENS, _COMPLETIONS)
    assert _VLLM.generate_routes(prompt, Facts(version="0.1.dev1+g12")) == (_TOKENS, _COMPLETIONS)
    assert _VLLM.generate_routes(prompt, _OLD) == (_COMPLETIONS, _TOKENS)
    assert _VLLM.generate_routes(Prompt(text="a"), _NEW) == (_COMPLETIONS,)
    assert _SGLANG.generate_routes(prompt, _NEW) == ("/generate",)


@pytest.mark.parametrize(
    ("call", "status", "words", "lacking"),
    [
        (_GENERATE, 404, "Not Found", True),
        (_GENERATE, 405, "Method Not Allowed", True),
        (_GENERATE, 501, "The model does not support generate tokens API", True),
        (_GENERATE, 403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out", True),
        (_GENERATE, 403, "your key may not do this", False),
        (_GENERATE, 400, "bad", False),
        (_GENERATE, 500, "Not Found", False),
        (_GENERATE, 503, "Generation is paused", False),
        (_COMPLETE, 404, "The model `x` does not exist. Valid aliases: tiny.", False),
        (Call(method="POST", path="/abort_requests"), 400, "Missing 'request_ids' in request body", True),
        (Call(method="POST", path="/abort_requests"), 400, "Invalid JSON format", False),
    ],
)
def test_what_an_engine_lacks(call: Call, status: int, words: str, lacking: bool) -> None:
    """An unknown model is not an unknown route."""
    assert _VLLM.lacks(call, status, words) is lacking


def test_the_recorded_refusals() -> None:
    """As a real engine words them."""
    wrong = recorded("completions_wrong_model")
    assert not _VLLM.lacks(_COMPLETE, wrong.status, wrong.answer["error"]["message"])
    legacy = recorded("gen_infabort_all_call")
    assert _VLLM.lacks(Call(method="POST", path=legacy.path), legacy.status, legacy.answer["error"]["message"])


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_tokens_in_and_out() -> None:
    """The smallest request: the number of tokens is said, and nothing is detokenized."""
    call = _call(_prompt())
    assert (call.method, call.path, call.admin, call.long, call.headers) == ("POST", _TOKENS, False, False, ())
    expected = {"token_ids": [1, 2, 3], "request_id": "r", "sampling_params": {"max_tokens": 128, "detokenize": False}}
    assert json.loads(call.body or b"") == expected


def test_completions_of_ids() -> None:
    """What the token route would take as neutral is said, for here the model's own would be taken."""
    body = _body(_prompt(fields={"return_logprob": True}), route=_COMPLETIONS)
    assert body.pop("prompt") == [1, 2, 3]
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    asked = {"max_tokens": 128, "logprobs": 0, "request_id": "r", "return_token_ids": True}
    assert body == {**neutral, **asked, "return_tokens_as_token_ids": True, "return_weight_versions": True}


def test_completions_of_text() -> None:
    """The ids come back, for a resume."""
    body = _body(Prompt(text="hello", sampling_params={"temperature": 0.5}), Facts(version="0.32.0"))
    assert (body["prompt"], body["temperature"], body["return_token_ids"]) == ("hello", 0.5, True)
    assert "return_weight_versions" not in body
    assert "logprobs" not in body


@pytest.mark.parametrize(("route", "entries"), [(_TOKENS, 4), (_COMPLETIONS, 3)])
def test_likeliest_tokens(route: str, entries: int) -> None:
    """The token route counts the sampled one among them."""
    body = _body(_prompt(fields={"return_logprob": True, "top_logprobs_num": 3}), route=route)
    assert body.get("sampling_params", body)["logprobs"] == entries


@pytest.mark.parametrize("route", [_TOKENS, _COMPLETIONS])
@pytest.mark.parametrize(("start", "asked"), [(None, None), (-1, None), (0, 0), (5, 0)])
def test_logprobs_of_the_prompt(route: str, start: int | None, asked: int | None) -> None:
    """All or none; the first ones are cut from the answer."""
    body = _body(_prompt(fields={"return_logprob": True, "logprob_start_len": start}), route=route)
    assert body.get("sampling_params", body).get("prompt_logprobs") == asked


def test_experts_of_a_resumed_sample() -> None:
    """Only the rows that are missing, where the engine knows how."""
    prompt = _prompt(fields={"return_routed_experts": True, "routed_experts_start_len": 2})
    assert _body(prompt)["sampling_params"]["routed_experts_prompt_start"] == 2
    assert _body(prompt, route=_COMPLETIONS)["routed_experts_prompt_start"] == 2
    assert "routed_experts_prompt_start" not in _body(prompt, _OLD, _COMPLETIONS)
    with pytest.raises(UnsupportedError, match=r"needs vLLM 0\.22"):
        _body(prompt, Facts(version="0.21.0"))


def test_further_fields() -> None:
    """vLLM's own pass; a high priority is a low number there; an adapter is a model; sessions are ours."""
    fields = {"cache_salt": "s", "priority": 3, "lora_path": "sql", "session_id": "a", "return_prompt_token_ids": True}
    body = _body(_prompt(fields=fields))
    assert body.keys() == {"token_ids", "request_id", "sampling_params", "cache_salt", "priority", "model"}
    assert (body["cache_salt"], body["priority"], body["model"]) == ("s", -3, "sql")


def test_fields_never_take_the_place_of_our_own() -> None:
    """The id and the prompt above all."""
    body = _body(_prompt(fields={"request_id": "x", "token_ids": [9], "sampling_params": {}}))
    assert (body["request_id"], body["token_ids"]) == ("r", [1, 2, 3])


def test_the_rank_is_a_header() -> None:
    """It has no field."""
    assert _call(_prompt(), dp_rank=1).headers == (("X-data-parallel-rank", "1"),)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"fields": {"return_hidden_states": True}}, "return_hidden_states"),
        ({"fields": {"custom_logit_processor": "x"}}, "custom_logit_processor"),
        ({"fields": {"lora_path": "a", "model": "b"}}, "lora_path"),
        ({"image_data": "x"}, "image_data"),
        ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"sampling_params": {"custom_params": {}}}, "custom_params"),
        ({"sampling_params": {"beam_width": 2}}, "beam_width"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "regex, ebnf"),
    ],
)
def test_what_vllm_lacks_is_said(given: Any, name: str) -> None:
    """By name, instead of being dropped."""
    with pytest.raises(UnsupportedError, match=name):
        _call(_prompt(**given))


def test_what_sglang_lacks_is_said() -> None:
    """A parameter of vLLM's alone, in a fleet of both."""
    prompt = _prompt(sampling_params=_COMMON.check_sampling({"bad_words": ["x"]}))
    with pytest.raises(UnsupportedError, match="SGLang has no sampling parameter bad_words"):
        _SGLANG.encode_generate(prompt, "r", facts=Facts(), dp_rank=None)


# --- the one vocabulary -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"min_new_tokens": 2}, {"min_tokens": 2}),
        ({"min_tokens": 2}, {"min_tokens": 2}),
        ({"seed": 7}, {"seed": 7}),
        ({"sampling_seed": 7}, {"seed": 7}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"stop": ["a"]}, {"stop": ["a"], "detokenize": True}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"ebnf": "root"}, {"structured_outputs": {"grammar": "root"}}),
        ({"json_schema": "{}"}, {"structured_outputs": {"json": "{}"}}),
        ({"json_schema": "$$ANY$$"}, {"structured_outputs": {"json_object": True}}),
        ({"choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"structural_tag": {"a": 1}}, {"structured_outputs": {"structural_tag": '{"a":1}'}}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"structured_outputs": {"json_object": True}}, {"structured_outputs": {"json_object": True}}),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        ),
        ({"stream_interval": 5}, {}),
        ({"extra_args": {"a": 1}}, {"extra_args": {"a": 1}}),
        (
            {"bad_words": ["x"], "spaces_between_special_tokens": False},
            {"bad_words": ["x"], "spaces_between_special_tokens": False},
        ),
        ({"logit_bias": {5: -1.5}}, {"logit_bias": {"5": -1.5}}),
    ],
)
def test_translation(given: Any, sent: Any) -> None:
    """Either family's words lead to the same request."""
    assert _sent(given) == {"max_tokens": 128, "detokenize": False, **sent}


def test_further_arguments_have_another_name_in_completions() -> None:
    """``vllm_xargs`` there, whichever the user writes."""
    assert _sent({"vllm_xargs": {"a": 1}}, _COMPLETIONS)["vllm_xargs"] == {"a": 1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 1, "max_new_tokens": 2}, "the same thing"),
        ({"min_tokens": 1, "min_new_tokens": 1}, "the same thing"),
        ({"seed": 1, "sampling_seed": 1}, "the same thing"),
        ({"logprobs": 1}, "return_logprob=True"),
        ({"prompt_logprobs": 0}, "logprob_start_len=0"),
        ({"routed_experts_prompt_start": 1}, "routed_experts_start_len"),
        ({"structured_outputs": {"regex": "a"}, "regex": "b"}, "give one"),
        ({"n": 2}, "pass n="),
        ({"nonsense": 1}, "unknown sampling parameter 'nonsense'"),
        ({OFFSET: 1}, "unknown sampling parameter"),
        ({"temperature": -1}, "temperature"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ],
)
def test_bad_parameters_are_named(given: Any, words: str) -> None:
    """Before it is known which engine gets them."""
    with pytest.raises(ValueError, match=words):
        _COMMON.check_sampling(given)


def test_the_vocabulary_is_what_any_dialect_knows() -> None:
    """What SGLang's own check takes comes out the same."""
    for key in SAMPLING_RULES:
        value: Any = {"stop": "a", "stop_token_ids": [1], "stop_regex": "a"}.get(key, 1)
        value = (
            True
            if key in {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
            else value
        )
        assert _COMMON.check_sampling({key: value}) == _SGLANG.check_sampling({key: value})
    assert not OWN_RULES.keys() & SAMPLING_RULES.keys()


# --- seeds ------------------------------------------------------------------------------------------------------------


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**20))
def test_a_resumed_seed_is_another_one(seed: int, done: int) -> None:
    """A function of both, in the range that engines take, and never the one that means none."""
    new = resumed_seed(seed, done)
    assert new == resumed_seed(seed, done)
    if seed == -1:
        assert new == -1
    else:
        assert 0 <= new < 2**63
        assert new != seed
        assert new != resumed_seed(seed, done + 1)


def test_a_resumed_sample_that_has_nothing_yet_keeps_its_seed() -> None:
    """Nothing was drawn."""
    assert resumed_seed(7, 0) == 7


def test_a_resumed_seed_is_made_when_the_engine_is_known() -> None:
    """SGLang goes on by itself, vLLM begins anew: the offset is never sent."""
    prompt = _prompt(sampling_params={"sampling_seed": 7, OFFSET: 10})
    assert _body(prompt)["sampling_params"] == {"max_tokens": 128, "detokenize": False, "seed": resumed_seed(7, 10)}
    call = _SGLANG.encode_generate(prompt, "r", facts=Facts(), dp_rank=None)
    assert json.loads(call.body or b"")["sampling_params"] == {"sampling_seed": 7}
