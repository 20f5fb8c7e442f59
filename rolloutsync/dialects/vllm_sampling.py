"""Sampling parameters of the one vocabulary → vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.dialects import sampling as rules
from rolloutsync.errors import UnsupportedError, shown
from rolloutsync.payload import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_RULES: dict[str, rules.Rule] = {
    "bad_words": rules.STOP,
    "allowed_token_ids": rules.IDS,
    "thinking_token_budget": rules.INTEGER,
    "repetition_detection": rules.JSON,
    "structured_outputs": rules.JSON,
    "extra_args": rules.JSON,
}
GRAMMARS = {  # vLLM's word → ours
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "choice": "choice",
    "structural_tag": "structural_tag",
    "structured_outputs": "structured_outputs",
}
_SAME = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias"),
    *("bad_words", "allowed_token_ids", "thinking_token_budget", "repetition_detection", "extra_args"),
)
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_WITHOUT_EFFECT = {"stream_interval"}  # answers are read whole
_HANDLED = {*_SAME, *_RENAMED, *_WITHOUT_EFFECT, *GRAMMARS.values(), "top_k"}
ANY_JSON = "$$ANY$$"  # SGLang's word for a schema that everything fits
_WORDS = 0x9E3779B97F4A7C15  # of SplitMix64, as the two below
_FIRST_MIX, _SECOND_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNSEEDED = -1


def to_vllm(params: Mapping[str, Any], default_max_new_tokens: int) -> dict[str, Any]:
    """The parameters in vLLM's words; the number of tokens is always said, for its own default differs by route.

    Raises:
        UnsupportedError: vLLM has no such parameter, or no such value; names both.
    """
    lacking = [key for key in params if key not in _HANDLED]
    if lacking:
        raise UnsupportedError(f"vLLM has no sampling parameter {lacking[0]} (value {shown(params[lacking[0]])})")
    sent = {key: params[key] for key in _SAME if key in params}
    sent |= {own: params[key] for key, own in _RENAMED.items() if key in params}
    sent.setdefault("max_tokens", default_max_new_tokens)
    if sent["max_tokens"] == 0:
        raise UnsupportedError("max_new_tokens is 0, but vLLM generates at least one token")
    if "top_k" in params:
        sent["top_k"] = max(0, params["top_k"])
    if constraint := _constraint(params):
        sent["structured_outputs"] = constraint
    return sent


def _constraint(params: Mapping[str, Any]) -> dict[str, Any]:
    given = {theirs: params[ours] for theirs, ours in GRAMMARS.items() if ours in params}
    if len(given) > 1:
        words = ", ".join(GRAMMARS[key] for key in given)
        raise UnsupportedError(f"vLLM takes one constraint at a time, not {words}")
    if "structured_outputs" in given:
        return dict(given["structured_outputs"])
    if given.get("json") == ANY_JSON:
        return {"json_object": True}
    tag = given.get("structural_tag")
    return {"structural_tag": to_json(tag).decode()} if isinstance(tag, dict) else given


def resumed_seed(seed: int, done: int) -> int:
    """A seed for what follows ``done`` tokens.

    vLLM draws from a generator that begins anew with each request: the same seed would repeat the draws that made the
    first tokens. The new one is a function of (seed, done) alone, and -1 stays what it is there: none.
    """
    if done == 0 or seed == _UNSEEDED:
        return seed
    mixed = (seed + done * _WORDS) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * _FIRST_MIX % 2**64
    mixed = (mixed ^ (mixed >> 27)) * _SECOND_MIX % 2**64
    return (mixed ^ (mixed >> 31)) >> 1
