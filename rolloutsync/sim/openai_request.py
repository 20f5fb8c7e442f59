"""From an OpenAI body to a `/generate` body: which field becomes which, the defaults, and the refusals.

As in the real engine, both OpenAI routes are translations around one and the same generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.replies import ApiError, object_error, validation_error
from rolloutsync.sim.tokenizer import Tokenizer

DEFAULT_MODEL = "default"
DEFAULT_COMPLETION_TOKENS = 16
BAD_REQUEST = "BadRequestError"
# The same in both routes and in `sampling_params`; null means the engine's default.
_SAME = (
    *("stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "regex", "ebnf", "n", "no_stop_trim", "ignore_eos"),
    *("skip_special_tokens", "logit_bias", "custom_params", "watermark"),
)
_OTHER_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
# The same in both routes and in `/generate`.
_SENT_THROUGH = (
    *("rid", "stream", "lora_path", "routed_dp_rank", "data_parallel_rank", "return_hidden_states"),
    *("return_routed_experts", "routed_experts_start_len", "session_id", "extra_key", "cache_salt", "priority"),
)


@dataclass(frozen=True, kw_only=True)
class OpenAIRequest:
    """One call: the `/generate` body that it comes to, and what its answer must have."""

    generate: Mapping[str, Any]
    model: str
    n: int
    stream: bool
    logprobs: bool
    usage_at_end: bool
    usage_in_chunks: bool
    echoes: tuple[str, ...] = ()
    token_ids: bool = False
    prompt_token_ids: bool = False


Parse = Callable[[Any, SimConfig, Tokenizer], OpenAIRequest]


def bad_request(message: str) -> ApiError:
    """What a request is answered with that no generation can be made of."""
    return object_error(400, message, BAD_REQUEST)


def parse_completion(body: Any, _: SimConfig, tokenizer: Tokenizer) -> OpenAIRequest:
    """Reads the body of `/v1/completions`.

    Raises:
        ApiError: The answer that the engine gives instead.
    """
    path = "/v1/completions"
    prompt, limit = _field(body, path, "prompt"), body.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    if not isinstance(prompt, str | list):
        raise validation_error(path, "string_type", "Input should be a valid string", ("body", "prompt", "str"))
    if not isinstance(limit, int) or limit <= 0:
        raise validation_error(path, "value_error", "Value error, max_tokens must be positive", ("body", "max_tokens"))
    if not prompt or (isinstance(prompt, list) and not any(prompt)):
        raise bad_request("Prompt cannot be empty")
    logprobs, echo = body.get("logprobs"), bool(body.get("echo"))
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    generate = {"text" if is_text else "input_ids": prompt} | _common(body, limit)
    generate |= _logprob_fields(logprobs is not None, logprobs or 0, start=0 if echo and logprobs else -1)
    return _request(
        body,
        generate,
        logprobs=logprobs is not None,
        echoes=_echoes(prompt, tokenizer) if echo else (),
        token_ids=bool(body.get("return_token_ids")),
        prompt_token_ids=bool(body.get("return_token_ids")),
    )


def parse_chat(body: Any, config: SimConfig, tokenizer: Tokenizer) -> OpenAIRequest:
    """Reads the body of `/v1/chat/completions`.

    Raises:
        ApiError: The answer that the engine gives instead.
    """
    path = "/v1/chat/completions"
    messages = _field(body, path, "messages")
    if not isinstance(messages, list):
        raise validation_error(path, "list_type", "Input should be a valid list", ("body", "messages"))
    if not messages:
        raise bad_request("Messages cannot be empty.")
    given = body.get("input_ids")
    ids = tokenizer.encode(render(messages, path)) if given is None else given
    room = max(1, config.context_length - len(ids) - 1)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or room
    logprobs = bool(body.get("logprobs"))
    generate = {"input_ids": ids} | _common(body, limit)
    generate |= _logprob_fields(logprobs, body.get("top_logprobs") or 0, start=-1)
    token_ids = bool(body.get("return_token_ids"))
    return _request(
        body,
        generate,
        logprobs=logprobs,
        token_ids=token_ids,
        prompt_token_ids=token_ids or bool(body.get("return_prompt_token_ids")),
    )


def render(messages: list[Any], path: str) -> str:
    """The chat template of the simulated model: every role on a line, its words below, the assistant last.

    Raises:
        ApiError: A message has no role, or content that is no text.
    """
    parts = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise validation_error(path, "missing", "Field required", ("body", "messages", number, "role"))
        parts.append(f"<|{message['role']}|>\n{_words(message.get('content'))}\n")
    return "".join(parts) + "<|assistant|>\n"


def _words(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _field(body: Any, path: str, name: str) -> Any:
    if not isinstance(body, dict):
        raise validation_error(path, "model_attributes_type", "Input should be a valid dictionary")
    if name not in body:
        raise validation_error(path, "missing", "Field required", ("body", name))
    return body[name]


def _common(body: Mapping[str, Any], limit: int) -> dict[str, Any]:
    sampling = {name: body[name] for name in _SAME if body.get(name) is not None}
    sampling |= {new: body[old] for old, new in _OTHER_NAMES.items() if body.get(old) is not None}
    fields = {name: body[name] for name in _SENT_THROUGH if body.get(name) is not None}
    wants_ids = bool(body.get("return_token_ids") or body.get("return_prompt_token_ids"))
    return fields | {"sampling_params": sampling | {"max_new_tokens": limit}, "return_prompt_token_ids": wants_ids}


def _logprob_fields(wanted: bool, top: int, *, start: int) -> dict[str, Any]:
    return {
        "return_logprob": wanted,
        "top_logprobs_num": top,
        "logprob_start_len": start,
        "return_text_in_logprobs": True,
    }


def _echoes(prompt: str | list[Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tokenizer.decode(prompt),)
    return tuple(each if isinstance(each, str) else tokenizer.decode(each) for each in prompt)


def _request(body: Mapping[str, Any], generate: Mapping[str, Any], **more: Any) -> OpenAIRequest:
    options = body.get("stream_options") or {}
    return OpenAIRequest(
        generate=generate,
        model=body.get("model") or DEFAULT_MODEL,
        n=int(body.get("n") or 1),
        stream=bool(body.get("stream")),
        usage_at_end=bool(options.get("include_usage")),
        usage_in_chunks=bool(options.get("continuous_usage_stats")),
        **more,
    )
