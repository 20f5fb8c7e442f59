"""Checks of sampling parameters that are the same for every engine: types and ranges, before anything is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rolloutsync.errors import UnsupportedError, shown
from rolloutsync.payload import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

Rule = tuple["Callable[[Any], bool]", str]

SEED = "sampling_seed"
OFFSET = "seed_offset"  # ours: tokens that a resumed sample has; never sent. Engines differ in what a seed does then


def _is_int(value: Any) -> bool:
    """A 64-bit integer: JSON on the wire holds no larger one."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_real(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_int(item) and item >= 0 for item in value)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value))


def _is_json(value: Any) -> bool:
    try:
        to_json(value)
    except (TypeError, ValueError):
        return False
    return True


COUNT: Rule = (lambda v: _is_int(v) and v >= 0, "an integer of at least 0")
INTEGER: Rule = (_is_int, "an integer")
NOT_NEGATIVE: Rule = (lambda v: _is_real(v) and v >= 0, "a finite number of at least 0")
POSITIVE: Rule = (lambda v: _is_real(v) and v > 0, "a finite number above 0")
FINITE: Rule = (_is_real, "a finite number")
SHARE: Rule = (lambda v: _is_real(v) and 0 < v <= 1, "a number above 0 and at most 1")
SHARE_OR_ZERO: Rule = (lambda v: _is_real(v) and 0 <= v <= 1, "a number from 0 to 1")
TOP_K: Rule = (lambda v: _is_int(v) and (v >= 1 or v == -1), "an integer of at least 1, or -1 for all")
IDS: Rule = (_is_ids, "a list of token ids")
STOP: Rule = (_is_stop, "a string or a list of strings")
FLAG: Rule = (lambda v: isinstance(v, bool), "True or False")
JSON: Rule = (_is_json, "something that JSON can say")


def as_mapping(params: Any, known: Collection[str]) -> dict[str, Any]:
    """The user's sampling parameters as a new dict: from a mapping, or from an object's known attributes.

    Raises:
        TypeError: Neither a mapping nor an object with any known attribute.
    """
    if params is None:
        return {}
    if hasattr(params, "keys"):
        return {key: _plain(params[key]) for key in params.keys()}  # noqa: SIM118 - any mapping-like object
    found = {key: getattr(params, key) for key in known if getattr(params, key, None) is not None}
    found = {key: value for key, value in found.items() if not (isinstance(value, (list, tuple)) and not value)}
    if found.get("n") == 1:  # the default of other libraries' classes
        del found["n"]
    if not found:
        raise TypeError(f"sampling_params must be a dict or an object with such attributes, got {shown(params)}")
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    """A numpy or torch scalar, or a small array of them, as the Python numbers that it stands for."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def check_members(params: Mapping[str, Any]) -> None:
    """Refuse ``n`` inside sampling parameters."""
    if params.get("n") is not None:
        raise ValueError(
            f"sampling_params['n'] is {shown(params['n'])}: pass n= to the call; members are separate requests"
        )


def check_values(params: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Check each parameter against its rule; None means the engine's default and passes.

    Raises:
        ValueError: An unknown key, or a value that breaks its rule; names both.
    """
    for key, value in params.items():
        if key not in rules:
            raise ValueError(
                f"unknown sampling parameter {shown(key)} (value {shown(value)}); known: {', '.join(sorted(rules))}"
            )
        holds, rule = rules[key]
        if value is not None and not holds(value):
            raise ValueError(f"sampling_params[{shown(key)}] must be {rule}, got {shown(value)}")


def rename(params: dict[str, Any], others: Mapping[str, str]) -> None:
    """Give parameters with other names their own, in place.

    Raises:
        ValueError: Both names are given.
    """
    for other, own in others.items():
        if params.get(other) is not None and params.get(own) is not None:
            raise ValueError(
                f"{other} ({shown(params[other])}) and {own} ({shown(params[own])}) are the same thing: give one"
            )
        if (value := params.pop(other, None)) is not None:
            params[own] = value


def refuse_unknown(params: Mapping[str, Any], known: Mapping[str, object], family: str) -> None:
    """Raise UnsupportedError for a parameter that only engines of another family have."""
    if params.keys() <= known.keys():
        return
    for key in params.keys() - known.keys() - {OFFSET}:
        raise UnsupportedError(f"{family} has no sampling parameter {key} (value {shown(params[key])})")


def with_seed(params: Mapping[str, Any], resumed_seed: Callable[[int, int], int]) -> Mapping[str, Any]:
    """The parameters as they are sent: the seed of a resumed sample is the engine's own function of it."""
    if OFFSET not in params:
        return params
    sent = {key: value for key, value in params.items() if key != OFFSET}
    if sent.get(SEED) is not None:
        sent[SEED] = resumed_seed(int(sent[SEED]), int(params[OFFSET]))
    return sent
