"""vLLM's sampling parameters: what they may be, and what the simulated model takes of them.

Unknown ones are ignored, as the real engine does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutsync.sim.replies import ApiError
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.vllm_errors import Detail, bad_value, invalid

DEFAULT_MAX_TOKENS = 16


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
    values, wrong = _coerced(given, where, nullable=nullable)
    if wrong:
        words = "Input should be an instance of SamplingParams"
        whole = Detail("is_instance_of", where, words, dict(given), {"class": "SamplingParams"})
        raise invalid(*([] if nullable else [whole]), *wrong)
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
    return Sampling(
        min_new_tokens=values.get("min_tokens", 0),
        stop=tuple(values.get("stop", ())),
        stop_token_ids=frozenset(values.get("stop_token_ids", ())),
        ignore_eos=values.get("ignore_eos", False),
        stop_ids_always=True,
        skip_special_tokens=values.get("skip_special_tokens", True),
        no_stop_trim=values.get("include_stop_str_in_output", False),
        seed=values.get("seed"),
    )


def _coerced(given: Mapping[str, Any], where: str, *, nullable: bool) -> tuple[dict[str, Any], list[Detail]]:
    """Returns the values as numbers where they are to be such, and what cannot be one."""
    values, wrong = {}, []
    for name, value in given.items():
        if value is None and (nullable or name in _NULLABLE):
            continue
        try:
            values[name] = COERCIONS[name](value) if name in COERCIONS else value
        except WrongTypeError as problem:
            wrong.append(problem.detail(f"{where}.{name}", value))
    return values, wrong


class WrongTypeError(Exception):
    """A value cannot be what it should; `index` is that of the item which is to blame."""

    def __init__(self, kind: str, message: str, index: int | None = None) -> None:
        super().__init__(kind, message, index)
        self.kind, self.message, self.index = kind, message, index

    def detail(self, place: str, value: Any) -> Detail:
        """Returns it as part of an answer."""
        if self.index is None:
            return Detail(self.kind, place, self.message, value)
        return Detail(self.kind, f"{place}.{self.index}", self.message, value[self.index])


def _integer(value: Any) -> int:
    words = "Input should be a valid integer"
    if isinstance(value, str):
        if re.fullmatch(r"\s*[+-]?\d+\s*", value) is None:
            raise WrongTypeError("int_parsing", f"{words}, unable to parse string as an integer")
        return int(value)
    if not isinstance(value, int | float) or value != int(value):
        raise WrongTypeError("int_type", words)
    return int(value)


def _number(value: Any) -> float:
    words = "Input should be a valid number"
    if not isinstance(value, int | float | str):
        raise WrongTypeError("float_type", words)
    try:
        return float(value)
    except ValueError as problem:
        raise WrongTypeError("float_parsing", f"{words}, unable to parse string as a number") from problem


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WrongTypeError("bool_type", "Input should be a valid boolean")
    return value


def integers(value: Any) -> list[int]:
    """Returns a list of whole numbers.

    Raises:
        WrongTypeError: It is no list, or one of its items is none.
    """
    if not isinstance(value, list):
        raise WrongTypeError("list_type", "Input should be a valid list")
    numbers: list[int] = []
    try:
        numbers.extend(map(_integer, value))
    except WrongTypeError as problem:
        raise WrongTypeError(problem.kind, problem.message, len(numbers)) from problem
    return numbers


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise WrongTypeError("list_type", "Input should be a valid list")
    return value


COERCIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens", "routed_experts_prompt_start"), _integer),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), _integer),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _number),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    **dict.fromkeys(("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"), _flag),
    "stop_token_ids": integers,
    "stop": _strings,
}
_NULLABLE = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "stop", "stop_token_ids")

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
