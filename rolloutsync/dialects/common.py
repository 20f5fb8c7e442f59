"""The one vocabulary of sampling parameters that users write, whichever engine runs the sample.

What comes out is in SGLang's words where both families have a thing, and in vLLM's for what vLLM alone has. A dialect
translates it when a request is made, and refuses by name what its engines lack.
"""

from __future__ import annotations

from typing import Any

from rolloutsync.dialects import sampling as rules
from rolloutsync.dialects.sglang import SAMPLING_RULES, SGLangDialect
from rolloutsync.dialects.vllm_sampling import ANY_JSON, GRAMMARS, OWN_RULES
from rolloutsync.errors import shown
from rolloutsync.payload import to_json

_RULES: dict[str, rules.Rule] = {**SAMPLING_RULES, **OWN_RULES}
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": rules.SEED,
    "include_stop_str_in_output": "no_stop_trim",
    "vllm_xargs": "extra_args",
}
_ELSEWHERE = {
    "logprobs": "pass return_logprob=True to the call, or top_logprobs_num= for the likeliest tokens",
    "prompt_logprobs": "pass logprob_start_len=0 to the call",
    "routed_experts_prompt_start": "pass routed_experts_start_len= to the call",
}
_KNOWN = (*_RULES, *_OTHER_NAMES, *_ELSEWHERE, "n")


class Common:
    """See ``Vocabulary``. Stateless."""

    default_max_new_tokens = SGLangDialect.default_max_new_tokens
    seed = rules.SEED
    grammars: tuple[str, ...] = tuple(GRAMMARS.values())
    penalties = SGLangDialect.penalties

    def check_sampling(self, params: Any) -> dict[str, Any]:
        """See ``Vocabulary.check_sampling``."""
        given = rules.as_mapping(params, _KNOWN)
        rules.check_members(given)
        given.pop("n", None)
        _check_elsewhere(given)
        rules.rename(given, _OTHER_NAMES)
        if given.get("top_k") == 0:
            given["top_k"] = -1  # vLLM's word for all
        rules.check_values(given, _RULES)
        return _without_wrapping({key: value for key, value in given.items() if value is not None})


def _check_elsewhere(given: dict[str, Any]) -> None:
    for name, advice in _ELSEWHERE.items():
        if (value := given.pop(name, None)) is not None:
            raise ValueError(
                f"sampling_params[{name!r}] is {shown(value)}, but it is not a sampling parameter: {advice}"
            )


def _without_wrapping(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``structured_outputs`` as the single constraint in it; one with further options stays as it is."""
    wrapped = given.get("structured_outputs")
    if not isinstance(wrapped, dict):
        return given
    held = {key: value for key, value in wrapped.items() if value is not None}
    if held == {"json_object": True}:
        held = {"json": ANY_JSON}
    own = next((GRAMMARS[key] for key in held if key in GRAMMARS), None)
    if len(held) != 1 or own is None:
        return given
    if own in given:
        raise ValueError(f"structured_outputs ({shown(wrapped)}) and {own} ({shown(given[own])}): give one")
    (value,) = held.values()
    del given["structured_outputs"]
    return {**given, own: to_json(value).decode() if isinstance(value, dict) else value}
