"""Sampling parameters of a request: which keys exist, what they may be, what the simulation uses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEYS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)
DEFAULT_MAX_NEW_TOKENS = 128
MAX_STOP_STRINGS = 32

_SEED_LIMIT = 2**63
_MOST_STOP_REGEXES = 32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the simulated model takes from a request's `sampling_params`.

    Attributes:
        stop_ids_always: `stop_token_ids` count with `ignore_eos`, too, as they do in vLLM and do not in SGLang.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_ids_always: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    seed: int | None = None


def unknown_key(params: Mapping[str, Any]) -> str | None:
    """Returns the first key that the engine does not know, or None."""
    return next((key for key in params if key not in KEYS), None)


def contract_error(key: str) -> str:
    """The strict check's words for an unknown key."""
    return f"unknown field `{key}`, expected one of {', '.join(f'`{known}`' for known in KEYS)}"


def parse(params: Mapping[str, Any], *, modern: bool = True) -> Sampling:
    """Makes `Sampling` of a request's parameters.

    Args:
        params: As they came.
        modern: Whether to refuse in the words of newer versions.

    Raises:
        ValueError: In the engine's own words, where a value is out of range.
    """
    given = {key: value for key, value in params.items() if value is not None}
    _check_ranges(given, modern=modern)
    sampling = Sampling(
        max_new_tokens=given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        min_new_tokens=given.get("min_new_tokens", 0),
        stop=_strings(given.get("stop", ())),
        stop_regex=_regexes(given.get("stop_regex", ())),
        stop_token_ids=frozenset(given.get("stop_token_ids", ())),
        ignore_eos=bool(given.get("ignore_eos", False)),
        skip_special_tokens=bool(given.get("skip_special_tokens", True)),
        no_stop_trim=bool(given.get("no_stop_trim", False)),
        stream_interval=given.get("stream_interval"),
        seed=given.get("sampling_seed"),
    )
    _check_lengths(sampling)
    return sampling


def _strings(value: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _regexes(value: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    patterns = _strings(value)
    if len(patterns) > _MOST_STOP_REGEXES:
        raise ValueError(f"at most {_MOST_STOP_REGEXES} stop_regex patterns are allowed, got {len(patterns)}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:  # the engine does not expect it and answers as to any bug of its own
            raise TypeError(f"stop_regex {pattern!r}: {error}") from error
    return patterns


def _check_ranges(given: Mapping[str, Any], *, modern: bool) -> None:
    temperature = given.get("temperature", 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        wanted = "a non-negative finite number" if modern else "non-negative"
        raise ValueError(f"temperature must be {wanted}, got {temperature}.")
    top_p, top_k = given.get("top_p", 1.0), given.get("top_k", -1)
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}.")
    if top_k != -1 and top_k < 1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    _check_penalties(given)
    seed = given.get("sampling_seed", 0)
    if not isinstance(seed, int):
        raise ValueError(f"sampling_seed must be an integer, got {type(seed).__name__}.")
    if not -_SEED_LIMIT <= seed < _SEED_LIMIT:
        raise ValueError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")


def _check_penalties(given: Mapping[str, Any]) -> None:
    min_p, repetition = given.get("min_p", 0.0), given.get("repetition_penalty", 1.0)
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p must be in [0, 1], got {min_p}.")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2.0 <= given.get(name, 0.0) <= 2.0:
            raise ValueError(f"{name} must be in [-2, 2], got {given[name]}.")
    if not 0.0 < repetition <= 2.0:
        raise ValueError(f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {repetition}.")


def _check_lengths(sampling: Sampling) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(sampling.stop)}")
    low, high = sampling.min_new_tokens, sampling.max_new_tokens
    if low < 0:
        raise ValueError(f"min_new_tokens must be in [0, max_new_tokens], got {low}.")
    if high < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {high}.")
    if low > high:
        raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({high})], got {low}.")
