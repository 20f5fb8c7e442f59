"""What a vLLM generation call asks for: the two bodies, their defaults and refusals."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import Headers

from rolloutsync.sim import vllm_params
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.tokenizer import Tokenizer
from rolloutsync.sim.vllm_engine import VllmJob
from rolloutsync.sim.vllm_errors import Detail, bad_value, error, invalid, late, missing, not_among
from rolloutsync.sim.vllm_params import Params

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
FILLED_SINCE = (0, 22, 0)  # from here on a generation without limit fills the context
MODES_SINCE = (0, 32, 0)
MODES = ("tokens", "text")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: its generations, and what its answer must have."""

    outer: str
    jobs: tuple[VllmJob, ...]
    n: int
    stream: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    weight_versions: bool = False
    mode: str = "tokens"
    echoes: tuple[str, ...] = ()


def parse_generate(body: Any, headers: Headers, config: SimConfig, _: Tokenizer) -> Call:
    """Reads the body of `/inference/v1/generate`.

    Raises:
        ApiError: The answer that the engine gives instead.
    """
    body = _object(body)
    ids = _check_generate(body)
    _check_model(body, config)
    given = body["sampling_params"]
    params = vllm_params.parse(given, "body.sampling_params", nullable=False)
    if "max_tokens" not in given and config.release < FILLED_SINCE:
        params = replace(params, max_tokens=vllm_params.DEFAULT_MAX_TOKENS)
    if params.n > config.max_running_requests and config.release >= FILLED_SINCE:
        most = config.max_running_requests
        raise bad_value(f"sampling_params.n must be at most the server's max_num_seqs ({most}), got {params.n}.")
    call = _call("generate-tokens", body, headers, config, params, [ids])
    return replace(call, mode=_mode(body)) if config.release >= MODES_SINCE else call


def parse_completion(body: Any, headers: Headers, config: SimConfig, tokenizer: Tokenizer) -> Call:
    """Reads the body of `/v1/completions`.

    Raises:
        ApiError: The answer that the engine gives instead.
    """
    body = _object(body)
    _check_completion(body)
    _check_model(body, config)
    limit = body.get("max_tokens", vllm_params.DEFAULT_MAX_TOKENS)
    params = vllm_params.parse({**body, "max_tokens": limit}, "body", nullable=True)
    prompts = _prompts(body["prompt"], tokenizer)
    _check_room(prompts, params.max_tokens, config)
    call = _call("cmpl", body, headers, config, params, prompts)
    echoes = tuple(tokenizer.decode(ids) for ids in prompts) if body.get("echo") else ()
    return replace(call, echoes=echoes)


def json_of(data: bytes) -> Any:
    """Decodes a generation call's body.

    Raises:
        ApiError: It is no JSON, or not there.
    """
    if not data:
        raise invalid(missing("body"))
    try:
        return json.loads(data)
    except ValueError as problem:
        place, words = getattr(problem, "pos", 0), getattr(problem, "msg", str(problem))
        raise invalid(Detail("json_invalid", f"body.{place}", "JSON decode error", {}, {"error": words})) from problem


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        words = "Input should be a valid dictionary or object to extract fields from"
        raise invalid(Detail("model_attributes_type", "body", words, body))
    return body


def _check_generate(body: Mapping[str, Any]) -> list[int]:
    """Returns the prompt's ids."""
    wrong, params = [], body.get("sampling_params")
    ids: list[int] = []
    if "token_ids" not in body:
        wrong.append(missing("body.token_ids", body))
    else:
        ids, problem = _ids(body["token_ids"])
        wrong += [] if problem is None else [problem]
    if "sampling_params" not in body:
        wrong.append(missing("body.sampling_params", body))
    elif not isinstance(params, dict):
        wrong.append(Detail("dict_type", "body.sampling_params", "Input should be a valid dictionary", params))
    if wrong:
        raise invalid(*wrong)
    return ids


def _ids(given: Any) -> tuple[list[int], Detail | None]:
    """Returns token ids, also of strings that are numbers, or what is wrong with them."""
    place = "body.token_ids"
    try:
        ids = vllm_params.integers(given)
    except vllm_params.WrongTypeError as problem:
        return [], problem.detail(place, given)
    if not ids:
        about = {"field_type": "List", "min_length": 1, "actual_length": 0}
        return [], Detail("too_short", place, "List should have at least 1 item after validation, not 0", given, about)
    if min(ids) < 0:
        words = "token_ids must not contain negative values"
        return [], Detail("value_error", place, f"Value error, {words}", given, {"error": ValueError(words)})
    return ids, None


def _mode(body: Mapping[str, Any]) -> str:
    mode = body.get("output_mode", "tokens")
    if mode not in MODES:
        raise invalid(not_among("body.output_mode", MODES, mode))
    return str(mode)


def _check_completion(body: Mapping[str, Any]) -> None:
    if body.get("prompt") in (None, ""):
        raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if body.get("stream_options") and not body.get("stream"):
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")


def _check_model(body: Mapping[str, Any], config: SimConfig) -> None:
    name = body.get("model")
    if name is not None and name != config.model_path:
        words = f"The model `{name}` does not exist. Valid aliases: {config.model_path}."
        raise error(404, words, param="model")


def _prompts(prompt: Any, tokenizer: Tokenizer) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if prompt == []:
        raise bad_value("You must pass at least one prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return [prompt]
    if not isinstance(prompt, list) or not all(isinstance(item, str | list) for item in prompt):
        raise invalid(Detail("string_type", "body.prompt", "Input should be a valid string", prompt))
    return [tokenizer.encode(item) if isinstance(item, str) else item for item in prompt]


def _check_room(prompts: list[list[int]], limit: int | None, config: SimConfig) -> None:
    """Completions refuse long prompts in words of their own."""
    longest, most = max(map(len, prompts)), config.context_length
    if limit is not None and limit > most:
        words = f"max_tokens={limit} cannot be greater than max_model_len={most}."
        raise bad_value(f"{words} Please request fewer output tokens.", "max_tokens", limit)
    if longest > most:
        words = f"This model's maximum context length is {most} tokens. However, your prompt contains {longest} input"
        words += " tokens, which exceeds this limit even without any output tokens."
        raise bad_value(f"{words} Please reduce the length of the input prompt.", "input_tokens", longest)
    if longest == most:
        raise bad_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)


def _call(
    prefix: str, body: Mapping[str, Any], headers: Headers, config: SimConfig, params: Params, prompts: list[list[int]]
) -> Call:
    caller = str(headers.get("x-request-id") or body.get("request_id") or uuid.uuid4().hex[:16])
    outer, options = f"{prefix}-{caller}", body.get("stream_options") or {}
    job = _template(outer, caller, headers, config, params)
    names = [outer if prefix == "generate-tokens" else f"{outer}-{place}" for place in range(len(prompts))]
    each = [replace(job, prompt=prompt, outer=name) for prompt, name in zip(prompts, names, strict=True)]
    return Call(
        outer=outer,
        jobs=tuple(sample for job in each for sample in _samples(job, params, config)),
        n=params.n,
        stream=bool(body.get("stream")),
        usage_at_end=bool(options.get("include_usage")),
        usage_in_chunks=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        weight_versions=bool(body.get("return_weight_versions")),
    )


def _template(outer: str, caller: str, headers: Headers, config: SimConfig, params: Params) -> VllmJob:
    return VllmJob(
        rid="",
        outer=outer,
        caller=caller,
        sampling=params.sampling,
        dp_rank=_dp_rank(headers, config),
        logprob=params.prompt_logprobs is not None,
        logprob_start=0,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
        routed_start=params.routed_start,
    )


def _dp_rank(headers: Headers, config: SimConfig) -> int | None:
    """The rank that the call is pinned to; what is no number is passed over."""
    text = headers.get("x-data-parallel-rank", "")
    if not text.strip().lstrip("-").isdigit():
        return None
    rank = int(text)
    if not 0 <= rank < config.dp_size:
        raise late(f"data_parallel_rank {rank} is out of range [0, {config.dp_size}).")
    return rank


def _samples(job: VllmJob, params: Params, config: SimConfig) -> list[VllmJob]:
    """The samples of one prompt: further ones have further seeds."""
    _check_prompt(job, config)
    room = min(config.context_length, config.max_total_tokens) - len(job.prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    samples = []
    for index in range(params.n):
        name = job.outer if params.n == 1 else f"{index}_{job.outer}"
        sampling = replace(job.sampling, seed=_seed(job.sampling.seed, index, config))
        samples.append(replace(job, rid=f"{name}-{uuid.uuid4().hex[:8]}", sampling=sampling, limit=limit))
    return samples


def _seed(given: int | None, index: int, config: SimConfig) -> int | None:
    if given is None:
        return random.getrandbits(62) if config.random_when_unseeded else None
    return given + index


def _check_prompt(job: VllmJob, config: SimConfig) -> None:
    size, most = len(job.prompt), config.context_length
    if not size:
        raise late("The decoder prompt cannot be empty")
    bad = next((token for token in (min(job.prompt), max(job.prompt)) if not 0 <= token < config.vocab_size), None)
    if bad is not None:
        raise late(f"Token id {bad} is out of vocabulary")
    if size > most:
        words = f"The decoder prompt (length {size}) is longer than the maximum model length of {most}."
        raise late(f"{words} Make sure that `max_model_len` is no smaller than the number of text tokens.")
    if size == most:
        words = f"The decoder prompt (length {size}) plus the number of requested output tokens (at least 1) is longer"
        words += f" than the maximum model length of {most}. Make sure that `max_model_len` is no smaller than the"
        raise late(f"{words} number of text tokens (prompt + requested output tokens).")
    if not 0 <= job.routed_start <= size:
        words = f"routed_experts_prompt_start must be between 0 and the prompt length ({size}), inclusive."
        raise late(words, "routed_experts_prompt_start", job.routed_start)
