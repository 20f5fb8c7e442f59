"""The strict check of a `/generate` body by newer engines: the type that each field may have, and how it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rolloutsync.sim import sampling

Check = Callable[[Any], None]


class ContractError(ValueError):
    """A field has a type that the engine does not take; the message is the engine's."""


def check(body: Mapping[str, Any]) -> None:
    """Checks a body's fields in the order in which they came; unknown ones are left alone at the top, refused below.

    Raises:
        ContractError: One has a wrong type or, among the sampling parameters, a wrong name.
    """
    for name, value in body.items():
        if name in _FIELDS and (value is not None or name in _NOT_NULL):
            _FIELDS[name](value)


def _refuse(value: Any, expected: str) -> None:
    raise ContractError(f"invalid type: {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    names: dict[type, str] = {int: f"integer `{value}`", float: f"floating point `{value}`", str: f'string "{value}"'}
    return names.get(type(value)) or {type(None): "null", list: "sequence", dict: "map"}[type(value)]


def _of(kinds: tuple[type, ...], expected: str) -> Check:
    def check_type(value: Any) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            _refuse(value, expected)

    return check_type


def _many(item: Check) -> Check:
    sequence = _of((list,), "a sequence")

    def check_items(value: Any) -> None:
        sequence(value)
        for each in value:
            item(each)

    return check_items


def _one_or_many(name: str, kind: type, item: Check) -> Check:
    one, many = _of((kind,), f"a value or an array of values for {name}"), _many(item)
    return lambda value: (many if isinstance(value, list) else one)(value)


def _or_null(item: Check) -> Check:
    def check_given(value: Any) -> None:
        if value is not None:
            item(value)

    return check_given


def _token_ids(value: Any) -> None:
    if not isinstance(value, list):
        _refuse(value, "a value or an array of values for TokenIdsOrList")
    if set(map(type, value)) == {int}:  # by far the most, and the longest
        return
    flat = not value or (isinstance(value[0], int | float) and not isinstance(value[0], bool))
    (_many(_INT) if flat else _many(_many(_INT)))(value)


def _unsigned(value: Any) -> None:
    _of((int,), "u64")(value)
    if value < 0:
        raise ContractError(f"invalid value: integer `{value}`, expected u64")


def _map_of(item: Check) -> Check:
    def check_values(value: Any) -> None:
        _of((dict,), "a map")(value)
        for each in value.values():
            item(each)

    return check_values


def _params(value: Any) -> None:
    struct = "struct SamplingParams" if isinstance(value, list) else "a value or an array of values for "
    expected = struct if isinstance(value, list) else f"{struct}SamplingParamsOrList"
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            _refuse(item, expected)
        for name, each in item.items():
            if name not in sampling.KEYS:
                raise ContractError(sampling.contract_error(name))
            if each is not None and name in _PARAMS:
                _PARAMS[name](each)


_INT = _of((int,), "i64")
_FLOAT = _of((int, float), "f64")
_BOOL = _of((bool,), "a boolean")
_STRING = _of((str,), "a string")
_STRINGS = _one_or_many("StringOrList", str, _STRING)
_INTS = _one_or_many("Int64OrList", int, _INT)
_BOOLS = _one_or_many("BoolOrList", bool, _BOOL)
_STRINGS_OR_NULLS = _one_or_many("OptionalStringOrList", str, _or_null(_STRING))
_INTS_OR_NULLS = _one_or_many("OptionalInt64OrList", int, _or_null(_INT))

_PARAMS: dict[str, Check] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed"), _INT),
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), _FLOAT),
    "repetition_penalty": _FLOAT,
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _BOOL),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _STRING),
    **dict.fromkeys(("stop", "stop_regex"), _STRINGS),
    "stop_token_ids": _many(_INT),
    "beam_width": _INT,
    "logit_bias": _map_of(_FLOAT),
    "choice": _many(_STRING),
}
_NOT_NULL = {"return_prompt_token_ids", "routed_experts_start_len"}
_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("rid", "text", "extra_key", "cache_salt"), _STRINGS),
    **dict.fromkeys(("input_ids", "token_ids_logprob"), _token_ids),
    "sampling_params": _params,
    **dict.fromkeys(("return_logprob", "return_sampling_mask", "return_hidden_states"), _BOOLS),
    **dict.fromkeys(("logprob_start_len", "top_logprobs_num"), _INTS),
    **dict.fromkeys(("routed_dp_rank", "disagg_prefill_dp_rank", "priority", "routed_experts_start_len"), _INT),
    **dict.fromkeys(("stream", "return_text_in_logprobs", "return_prompt_token_ids", "require_reasoning"), _BOOL),
    **dict.fromkeys(("session_id", "routing_key"), _STRING),
    **dict.fromkeys(("lora_path", "custom_logit_processor"), _STRINGS_OR_NULLS),
    **dict.fromkeys(("bootstrap_host", "bootstrap_pair_key"), _STRINGS_OR_NULLS),
    **dict.fromkeys(("bootstrap_port", "bootstrap_room", "decode_tp_size"), _INTS_OR_NULLS),
    "max_thinking_tokens": _unsigned,
    "custom_labels": _map_of(_STRING),
    "modalities": _many(_or_null(_STRING)),
}
