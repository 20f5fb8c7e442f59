"""Sampling parameters: checked before anything is sent, in the engine's words after."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutsync.dialects.base import Facts
from rolloutsync.dialects.sglang import SAMPLING_RULES, SGLangDialect

from .golden import recorded
from .makers import prompt

_DIALECT = SGLangDialect()


def _check(params: Any) -> dict[str, Any]:
    return _DIALECT.check_sampling(params)


def _on_the_wire(params: Any) -> Any:
    call = _DIALECT.encode_generate(prompt(sampling_params=_check(params)), "r", facts=Facts(), dp_rank=None)
    return json.loads(call.body or b"")["sampling_params"]


def test_we_know_exactly_the_keys_that_the_engine_knows() -> None:
    """By the engine's own list; ``n`` alone is not for users to set."""
    said = recorded("error_sampling_key").answer["error"]
    engine = {word.strip("`,") for word in said.split("expected one of ")[1].split()}
    assert engine == {*SAMPLING_RULES, "n"}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_new_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_new_tokens": 0}, {"max_new_tokens": 0}),
        ({"max_tokens": 5, "max_new_tokens": None}, {"max_new_tokens": 5}),
        ({"max_tokens": None, "max_new_tokens": 5}, {"max_new_tokens": 5}),
        ({"stop": None, "temperature": 0}, {"temperature": 0}),
        (SimpleNamespace(n=1, top_p=0.5), {"top_p": 0.5}),
        ({"n": None}, {}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"stop": ("a", "b")}, {"stop": ["a", "b"]}),
        ({"stop_token_ids": (1, 2)}, {"stop_token_ids": [1, 2]}),
        ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": [1, 2]}),
        ({"stop_token_ids": [np.int64(1)]}, {"stop_token_ids": [1]}),
        ({"logit_bias": {5: -1.5}}, {"logit_bias": {"5": -1.5}}),
        ({"logit_bias": {"5": np.float32(0.5)}}, {"logit_bias": {"5": 0.5}}),
        ({"custom_params": {"a": [1, None, {"b": True}]}}, {"custom_params": {"a": [1, None, {"b": True}]}}),
        ({"sampling_seed": -5}, {"sampling_seed": -5}),
    ],
)
def test_what_is_sent(given: Any, sent: dict[str, Any]) -> None:
    """One name for one thing; None means the engine's default and is not sent."""
    assert _on_the_wire(given) == sent


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"temperature": np.float64(0.25)}, 0.25),
        ({"temperature": np.array(0.5)}, 0.5),
        ({"max_new_tokens": np.int64(7)}, 7),
        ({"ignore_eos": np.bool_(True)}, True),
    ],
)
def test_numpy_scalars_are_numbers(given: dict[str, Any], sent: Any) -> None:
    """Of the Python type they stand for."""
    (got,) = _check(given).values()
    assert got == sent
    assert type(got) is type(sent)


@dataclass
class _Params:
    temperature: float = 0.5
    max_tokens: int = 9
    top_p: float | None = None
    n: int = 1
    private: str = "mine"
    stop: list[str] = field(default_factory=lambda: ["a"])


def test_objects_with_such_attributes_will_do() -> None:
    """What they have beside that is their own business."""
    expected = {"temperature": 0.5, "max_new_tokens": 9, "stop": ["a"]}
    assert _check(_Params()) == expected
    assert _check(SimpleNamespace(**vars(_Params()))) == expected
    assert _check(MappingProxyType({"temperature": 0.5})) == {"temperature": 0.5}


@pytest.mark.parametrize("given", [7, "temperature", [("temperature", 1)], object(), SimpleNamespace(temprature=1)])
def test_what_is_neither_is_refused(given: Any) -> None:
    """Rather than silently meaning nothing."""
    with pytest.raises(TypeError, match="sampling_params must be a dict or an object"):
        _check(given)


@pytest.mark.parametrize("n", [0, 2, 3.0, "1", [1]])
def test_members_are_not_sampling_parameters(n: Any) -> None:
    """``n`` in there would turn the answer into a list (B24)."""
    for given in ({"n": n}, SimpleNamespace(n=n)):
        with pytest.raises(ValueError, match=r"pass n= to the call") as caught:
            _check(given)
        assert repr(n) in str(caught.value)


def test_both_names_at_once_are_an_error() -> None:
    """Also when they agree: one of them is a mistake."""
    for other in (5, 6):
        with pytest.raises(ValueError, match=r"max_tokens \(5\) and max_new_tokens"):
            _check({"max_tokens": 5, "max_new_tokens": other})


@pytest.mark.parametrize("key", ["temprature", "max_length", "rid", "stream", "do_sample", 5])
def test_unknown_keys_are_named(key: Any) -> None:
    """With the list of those that exist."""
    with pytest.raises(ValueError, match="unknown sampling parameter") as caught:
        _check({key: 1})
    assert repr(key) in str(caught.value)
    assert "max_new_tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("temperature", [math.nan, math.inf, -0.1, "1", True, [1.0], 10**400, np.float32("nan")]),
        ("top_p", [0, -0.1, 1.01, math.nan, "1", True]),
        ("top_k", [0, -2, 1.5, True, "5"]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("max_new_tokens", [-1, 1.0, "5", True, math.nan, 2**70]),
        ("max_tokens", [-1, 1.0, "5", True]),
        ("min_new_tokens", [-1, 0.5]),
        ("frequency_penalty", [math.nan, "x", math.inf]),
        ("presence_penalty", [math.nan, "x"]),
        ("repetition_penalty", [0, -1, math.nan]),
        ("stop", [5, [5], {"a": 1}]),
        ("stop_token_ids", [5, ["a"], [1.5], [True], [-1]]),
        ("sampling_seed", [1.5, "x", True, 2**70]),
        ("ignore_eos", [1, "yes"]),
        ("skip_special_tokens", [0]),
        ("logit_bias", [{5: math.nan}, {5: object()}]),
        ("custom_params", [{"a": object()}, {"a": math.inf}, {"a": b"x"}, {"a": {1}}]),
    ],
)
def test_bad_values_are_named_before_anything_is_sent(key: str, values: list[Any]) -> None:
    """B08e: NaN as a temperature is an error here, not an hour of retries."""
    for value in values:
        with pytest.raises(ValueError, match=r"must be") as caught:
            _check({key: value})
        assert ("max_new_tokens" if key == "max_tokens" else key) in str(caught.value)


def test_the_users_dict_is_never_changed() -> None:
    """Nor anything in it, nor by what happens to ours."""
    given = {"max_tokens": 5, "stop": ["a"], "stop_token_ids": [1], "n": None, "top_p": None, "logit_bias": {5: 1.0}}
    before = copy.deepcopy(given)
    checked = _check(given)
    checked["stop"].append("b")
    checked["stop_token_ids"].append(2)
    assert given == before


@pytest.mark.parametrize("mode", ["keep", "", None, "ABORT", 5])
def test_unknown_pause_modes_are_refused(mode: Any) -> None:
    """The message has those that exist."""
    with pytest.raises(ValueError, match=r"'abort', 'in_place', 'retract'"):
        _DIALECT.pause(mode)


@pytest.mark.parametrize(
    ("version", "keys"),
    [
        ("0.5.23", {"routed_dp_rank"}),
        ("0.5.10", {"routed_dp_rank"}),
        ("0.5.9", {"routed_dp_rank", "data_parallel_rank"}),
        (None, {"routed_dp_rank", "data_parallel_rank"}),
        ("main", {"routed_dp_rank", "data_parallel_rank"}),
    ],
)
def test_the_rank_field_goes_by_the_version(version: str | None, keys: set[str]) -> None:
    """Both names where the version does not tell."""
    call = _DIALECT.encode_generate(prompt(), "r", facts=Facts(version=version), dp_rank=1)
    body = json.loads(call.body or b"")
    assert {key: body[key] for key in keys} == dict.fromkeys(keys, 1)
    assert not ({"routed_dp_rank", "data_parallel_rank"} - keys) & body.keys()


def test_what_users_send_through_does_not_override_what_is_ours() -> None:
    """The rid above all."""
    fields = {"rid": "x", "sampling_params": {"n": 2}, "input_ids": [9]}
    call = _DIALECT.encode_generate(prompt(fields=fields), "r", facts=Facts(), dp_rank=None)
    assert json.loads(call.body or b"") == {"rid": "r", "sampling_params": {}, "input_ids": [1, 2, 3]}


def test_text_and_images_are_sent() -> None:
    """A text prompt has no ids; the engine is asked for them."""
    call = _DIALECT.encode_generate(
        prompt(input_ids=None, text="häh", image_data=["aGk="], fields={}), "r", facts=Facts(), dp_rank=None
    )
    body = json.loads(call.body or b"")
    told = {"return_prompt_token_ids": True}
    assert body == {"text": "häh", "image_data": ["aGk="], "rid": "r", "sampling_params": {}, **told}


def test_n_in_a_dict_is_refused_even_when_it_is_one() -> None:
    """A dict says what its writer meant; an object's n=1 is the default of another library's class."""
    with pytest.raises(ValueError, match=r"sampling_params\['n'\] is 1: pass n= to the call"):
        _check({"n": 1})
