"""vLLM's sampling parameters: what they may be, and what the simulated model takes of them.

Unknown ones are ignored, as the real engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutsync.sim.replies import ApiError
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.vllm_errors import bad_value, invalid

DEFAULT_MAX_TOKENS = 16

_INTEGERS = ("n", "top_k", "min_tokens", "routed_experts_prompt_start")
_INTEGERS_OR_NULL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


@dataclass(frozen=True, kw_only=True)
class Params:
    """What a call wants of each of its generations."""

    sampling: Sampling
    n: int = 1
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_start: int = 0


def parse(given: Mapping[str, Any], where: str, *, nullable: bool) -> Params:
    """Makes parameters of what came.

    Args:
        given: The parameters by vLLM's names; others are passed over.
        where: The body's path to them, for messages.
        nullable: Whether null stands for the default everywhere, as in `/v1/completions`.

    Raises:
        ApiError: The answer that the engine gives instead.
    """
    values = {key: value for key, value in given.items() if value is not None} if nullable else dict(given)
    _check_types(values, where)
    _check_ranges(values)
    return Params(
        sampling=_sampling(values),
        n=values.get("n", 1),
        max_tokens=values.get("max_tokens"),
        logprobs=values.get("logprobs"),
        prompt_logprobs=values.get("prompt_logprobs"),
        routed_start=values.get("routed_experts_prompt_start", 0),
    )


def _sampling(values: Mapping[str, Any]) -> Sampling:
    stop = values.get("stop") or ()
    return Sampling(
        min_new_tokens=values.get("min_tokens", 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(values.get("stop_token_ids") or ()),
        ignore_eos=values.get("ignore_eos", False),
        stop_ids_always=True,
        skip_special_tokens=values.get("skip_special_tokens", True),
        no_stop_trim=values.get("include_stop_str_in_output", False),
        seed=values.get("seed"),
    )


def _check_types(values: Mapping[str, Any], where: str) -> None:
    wrong = [_wrong(name, value, where) for name, value in values.items()]
    if found := [detail for detail in wrong if detail is not None]:
        raise invalid(*found)


def _wrong(name: str, value: Any, where: str) -> tuple[str, str, str, Any] | None:
    kind, path = type(value), f"{where}.{name}"
    if name in _INTEGERS and kind is not int:
        return "int_type", path, "Input should be a valid integer", value
    if name in _INTEGERS_OR_NULL and kind not in (int, type(None)):
        return "int_type", path, "Input should be a valid integer", value
    if name in _NUMBERS and kind not in (int, float):
        return "float_type", path, "Input should be a valid number", value
    if name in _FLAGS and kind is not bool:
        return "bool_type", path, "Input should be a valid boolean", value
    if name == "stop_token_ids" and value is not None and not _all(value, int):
        return "list_type", path, "Input should be a valid list", value
    if name == "stop" and value is not None and kind is not str and not _all(value, str):
        return "list_type", path, "Input should be a valid list", value
    return None


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


Check = tuple[str, Callable[[Any], bool], str]
# Field, what is good, the words for what is not.
_RANGES: tuple[Check, ...] = (
    ("n", lambda value: value >= 1, "n must be at least 1, got {}."),
    ("presence_penalty", lambda value: -2 <= value <= 2, "presence_penalty must be in [-2, 2], got {}."),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "frequency_penalty must be in [-2, 2], got {}."),
    ("repetition_penalty", lambda value: value > 0, "repetition_penalty must be greater than zero, got {}."),
    ("temperature", lambda value: math.isfinite(value) and value >= 0, "temperature must be non-negative, got {}."),
    ("temperature", lambda value: value <= 2, "temperature must be in [0, 2], got {}."),
    ("top_p", lambda value: 0 < value <= 1, "top_p must be in (0, 1], got {}."),
    ("top_k", lambda value: value >= -1, "top_k must be 0 (disable), or at least 1, got {}."),
    ("min_p", lambda value: 0 <= value <= 1, "min_p must be in [0, 1], got {}."),
    ("max_tokens", lambda value: value >= 1, "max_tokens must be at least 1, got {}."),
    ("min_tokens", lambda value: value >= 0, "min_tokens must be greater than or equal to 0, got {}."),
    ("logprobs", lambda value: value >= -1, "logprobs must be non-negative or -1, got {}."),
    ("prompt_logprobs", lambda value: value >= -1, "prompt_logprobs must be non-negative or -1, got {}."),
    (
        "stop",
        lambda value: "" not in ([value] if isinstance(value, str) else value),
        "stop cannot contain an empty string.",
    ),
)
_NAMED = ("temperature", "top_p", "max_tokens", "logprobs", "prompt_logprobs")


def _check_ranges(values: Mapping[str, Any]) -> None:
    for name, good, words in _RANGES:
        if (value := values.get(name)) is not None and not good(value):
            raise _out_of_range(name, value, words)
    low, high = values.get("min_tokens", 0), values.get("max_tokens")
    if high is not None and low > high:
        raise bad_value(f"min_tokens must be less than or equal to max_tokens={high}, got {low}.")
    if values.get("stop") and values.get("detokenize") is False:
        words = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
        raise bad_value(words)


def _out_of_range(name: str, value: Any, words: str) -> ApiError:
    named = name in _NAMED
    return bad_value(words.format(value), name if named else None, value if named else None)
