"""A prompt → the body of vLLM's generate requests: token ids in and out, or completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.dialects import sampling as rules
from rolloutsync.dialects.base import Facts, version_tuple
from rolloutsync.dialects.vllm_sampling import resumed_seed, to_vllm
from rolloutsync.errors import UnsupportedError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rolloutsync.sample import Prompt

TOKENS = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
SAYS_ID_SINCE = (0, 25)  # before it the token route answers with an id of its own making
_REAL_VERSION = (0, 8)  # builds without a tag call themselves 0.1
_MOST_LOGPROBS = 20  # that may be asked for, unless the server was started otherwise
_EXPERTS_SINCE = (0, 22)
_EXPERTS_START_SINCE = (0, 28)  # of completions, which send all rows before
_COMPLETIONS_SAY_WEIGHTS_SINCE = (0, 33)
RANKS = ("routed_dp_rank", "data_parallel_rank")  # SGLang's words for what is a header here
_TRANSLATED = {
    *("return_logprob", "top_logprobs_num", "logprob_start_len", "return_routed_experts", "routed_experts_start_len"),
    *("return_hidden_states", "return_prompt_token_ids", "priority", "session_id", "lora_path", *RANKS),
}
_LACKS = {  # what SGLang alone has; anything else is sent through
    *("return_hidden_states", "token_ids_logprob", "return_text_in_logprobs", "custom_logit_processor"),
    *("input_embeds", "audio_data", "video_data", "modalities", "session_params", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "extra_key", "return_bytes", "return_entropy", "return_indexer_topk"),
}
_NEUTRAL = {  # completions would take the model's own for what is not said, the token route would not
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def known_version(facts: Facts) -> tuple[int, ...]:
    """The engine's version, or an empty tuple where it is unknown or made up."""
    version = version_tuple(facts.version)
    return version if version >= _REAL_VERSION else ()


def routes(prompt: Prompt, facts: Facts) -> tuple[str, ...]:
    """The paths for this prompt, best first.

    Up to 0.24 the token route does not say whose answer it is, so completions, which do, come first there.
    """
    if prompt.input_ids is None:
        return (COMPLETIONS,)
    version = known_version(facts)
    silent = bool(version) and version < SAYS_ID_SINCE
    too_many = int(prompt.fields.get("top_logprobs_num") or 0) >= _MOST_LOGPROBS  # it would be asked for one more
    return (COMPLETIONS, TOKENS) if silent or too_many else (TOKENS, COMPLETIONS)


def body_of(prompt: Prompt, rid: str, facts: Facts, route: str, default_max_new_tokens: int) -> dict[str, Any]:
    """The request's JSON.

    Raises:
        UnsupportedError: vLLM, or this version, has no such parameter or field.
    """
    check_fields(prompt, facts)
    sampling = to_vllm(rules.with_seed(prompt.sampling_params, resumed_seed), default_max_new_tokens)
    sampling |= _of_prompt(prompt)
    make = _tokens_body if route == TOKENS else _completions_body
    passed = {key: value for key, value in prompt.fields.items() if key not in _TRANSLATED and key not in _LACKS}
    return {**passed, **make(prompt, sampling, facts), **_common(prompt.fields), "request_id": rid}


def check_fields(prompt: Prompt, facts: Facts) -> None:
    """Raise UnsupportedError for what this engine cannot do, instead of leaving it out."""
    if prompt.image_data is not None:
        raise UnsupportedError("vLLM takes no image_data here: send its own multimodal fields instead")
    for name in _LACKS:
        if prompt.fields.get(name):
            raise UnsupportedError(f"vLLM has no request field {name} (value {shown(prompt.fields[name])})")
    version = known_version(facts)
    if prompt.fields.get("return_routed_experts") and version and version < _EXPERTS_SINCE:
        raise UnsupportedError(f"return_routed_experts needs vLLM 0.22, this engine is {facts.version}")


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    """What is asked for beside tokens, as far as both routes call it the same."""
    fields = prompt.fields
    asked: dict[str, Any] = {}
    if fields.get("return_logprob"):
        asked["logprobs"] = int(fields.get("top_logprobs_num") or 0)
        if _start_of_prompt_logprobs(fields) is not None:
            asked["prompt_logprobs"] = 0
    return asked


def _start_of_prompt_logprobs(fields: Mapping[str, Any]) -> int | None:
    start = fields.get("logprob_start_len")
    return None if start is None or int(start) < 0 else int(start)


def _tokens_body(prompt: Prompt, sampling: dict[str, Any], _: Facts) -> dict[str, Any]:
    """Nothing is turned into text that nobody sees, unless stop strings are looked for in it.

    The route returns as many entries as were asked for, the sampled token among them: one more makes them enough.
    """
    if sampling.get("logprobs"):
        sampling["logprobs"] += 1
    start = _rows_to_skip(prompt.fields)
    if start:
        sampling["routed_experts_prompt_start"] = start
    sampling["detokenize"] = bool(sampling.get("stop"))
    return {"token_ids": prompt.input_ids, "sampling_params": sampling}


def _completions_body(prompt: Prompt, sampling: dict[str, Any], facts: Facts) -> dict[str, Any]:
    body = {**_NEUTRAL, **sampling, "return_token_ids": True}
    body["prompt"] = prompt.text if prompt.input_ids is None else prompt.input_ids
    if "logprobs" in sampling:
        body["return_tokens_as_token_ids"] = True
    if "extra_args" in body:
        body["vllm_xargs"] = body.pop("extra_args")
    start, version = _rows_to_skip(prompt.fields), known_version(facts)
    if start and not (version and version < _EXPERTS_START_SINCE):
        body["routed_experts_prompt_start"] = start
    if version >= _COMPLETIONS_SAY_WEIGHTS_SINCE:
        body["return_weight_versions"] = True
    return body


def _rows_to_skip(fields: Mapping[str, Any]) -> int:
    return int(fields.get("routed_experts_start_len") or 0) if fields.get("return_routed_experts") else 0


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that both routes have. A high priority is the later one there, and a LoRA adapter is a model."""
    body: dict[str, Any] = {}
    if fields.get("priority"):
        body["priority"] = -int(fields["priority"])
    if (adapter := fields.get("lora_path")) is not None:
        if "model" in fields:
            raise UnsupportedError(f"lora_path ({shown(adapter)}) and model ({shown(fields['model'])}): give one")
        body["model"] = adapter
    return body
