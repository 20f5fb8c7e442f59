"""From a `/generate` body to generations: shapes, defaults and refusals in the engine's own words."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rolloutsync.sim import contract
from rolloutsync.sim import sampling as sampling_params
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.replies import ApiError, internal_error, validation_error, value_error
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.tokenizer import Tokenizer

STRICT_SINCE = (0, 5, 22)
START_LEN_SINCE = (0, 5, 12)
DP_RANK_SINCE = (0, 5, 10)
DEPRECATED_DP_RANK_IGNORED = ((0, 5, 15), (0, 5, 17))
BARE_TYPES: dict[str, type | tuple[type, ...]] = {
    "rid": str,
    "text": str,
    "return_logprob": (bool, int),
    "logprob_start_len": int,
    "top_logprobs_num": int,
    "priority": int,
    "routed_dp_rank": int,
}
PER_ITEM_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One generation that a body asks for."""

    rid: str
    prompt: list[int] = field(default_factory=list)
    params: Mapping[str, Any] = field(default_factory=dict)
    dp_rank: int | None = None
    logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    token_ids_logprob: tuple[int, ...] | None = None
    logprob_text: bool = False
    routed_experts: bool = False
    routed_start: int = 0
    hidden_states: bool | str = False
    prompt_token_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All that one call asks for."""

    jobs: list[Job]
    copies: int
    is_list: bool
    stream: bool


def parse(body: Any, config: SimConfig, tokenizer: Tokenizer, *, strict: bool = True) -> Asked:
    """Makes generations of a decoded body.

    Args:
        body: Decoded.
        config: The engine's.
        tokenizer: For prompts that are text.
        strict: Whether the contract of newer versions holds; it is that of `/generate` alone.

    Raises:
        ApiError: The answer that the engine gives instead.
    """
    if not isinstance(body, dict):
        raise validation_error("/generate", "model_attributes_type", "Input should be a valid dictionary")
    _check_types(body)
    if strict:
        _check_contract(body, config)
    prompts, is_list = _prompts(body, tokenizer)
    given = body.get("sampling_params")
    if not is_list and (isinstance(given, list) or isinstance(body.get("rid"), list)):
        raise internal_error()
    params = _per_item({} if given is None else given, len(prompts))
    copies = _copies(params)
    _check_lists(body, copies)
    rids = _rids(body.get("rid"), len(prompts), is_list=is_list)
    rank = _dp_rank(body, config)
    jobs = [
        replace(_job(body, index, rid), prompt=prompt, params=item, dp_rank=rank)
        for index, (rid, prompt, item) in enumerate(zip(rids, prompts, params, strict=True))
    ]
    if copies > 1:
        jobs = [replace(job, rid=uuid.uuid4().hex) for job in jobs for _ in range(copies)]
    return Asked(jobs=jobs, copies=max(1, copies), is_list=is_list or copies > 1, stream=bool(body.get("stream")))


def check(job: Job, config: SimConfig) -> Sampling:
    """Returns a generation's checked sampling parameters.

    Raises:
        ApiError: Too long, out of range, or asks for what the engine was not started with.
    """
    size, wanted = len(job.prompt), job.params.get("max_new_tokens")
    if size >= config.context_length:
        limit = f"the model's context length ({config.context_length} tokens)."
        raise value_error(f"The input ({size} tokens) is longer than {limit}")
    if wanted is not None and size + wanted > config.context_length:
        raise value_error(_too_long(size, wanted, config.context_length))
    _check_extras(job, config)
    _check_starts(job, config)
    try:
        parsed = sampling_params.parse(job.params, modern=config.release >= START_LEN_SINCE)
    except ValueError as error:
        raise value_error(str(error)) from error
    except TypeError as error:
        raise internal_error() from error
    if parsed.seed is None and config.random_when_unseeded:
        return replace(parsed, seed=random.getrandbits(62))
    return parsed


def is_fatal(job: Job, config: SimConfig) -> bool:
    """Returns whether the engine dies of it: an empty prompt, an id that the model does not know, a bad start."""
    if not job.prompt or (job.logprob and job.logprob_start < -1):
        return True
    return max(job.prompt) >= config.vocab_size or min(job.prompt) < 0


def output_limit(sampling: Sampling, prompt_tokens: int, config: SimConfig) -> int:
    """Returns how many tokens a generation can have at most."""
    room = min(config.context_length, config.max_total_tokens) - 1
    return max(0, min(sampling.max_new_tokens, room - prompt_tokens - 1))


def _check_types(body: Mapping[str, Any]) -> None:
    ids, path = body.get("input_ids"), "/generate"
    if ids is not None and not isinstance(ids, list):
        raise validation_error(path, "value_error", f"Value error, must be list or null; got {type(ids).__name__}")
    kinds = set(map(type, ids or []))
    inner = {kind for item in ids or [] for kind in map(type, item)} if kinds == {list} else {int}
    wrong = next(iter((kinds - {int, list}) | (inner - {int})), None)
    if wrong is not None or len(kinds) > 1:
        name = "list" if wrong is None else wrong.__name__
        raise validation_error(path, "value_error", f"Value error, elements must be int or list; got {name}")
    params = body.get("sampling_params")
    if params is not None and not isinstance(params, dict | list):
        raise validation_error(path, "dict_type", "Input should be a valid dictionary")
    wrong_field = next((name for name, value in body.items() if not _may_have(name, value)), None)
    if wrong_field is not None:
        raise validation_error(path, "type", "Input should be of another type", ("body", wrong_field))


def _may_have(name: str, value: Any) -> bool:
    """Whether a top-level field may have this value by its bare type; the strict check comes after this one."""
    if name == "stream":
        return value is not None and not isinstance(value, str | list | dict)
    kinds = BARE_TYPES.get(name)
    if value is None or kinds is None:
        return True
    return all(isinstance(each, kinds) for each in (value if isinstance(value, list) else [value]))


def _check_contract(body: Mapping[str, Any], config: SimConfig) -> None:
    if config.release >= STRICT_SINCE:
        try:
            contract.check(body)
        except contract.ContractError as error:
            raise ApiError(400, {"error": str(error)}) from error
        return
    params = body.get("sampling_params") or {}
    if any(sampling_params.unknown_key(item) for item in (params if isinstance(params, list) else [params])):
        raise internal_error()


def _prompts(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None and ids is None:
        texts = [text] if isinstance(text, str) else text
        return [tokenizer.encode(item) or [1] for item in texts], not isinstance(text, str)
    if ids is None:
        raise value_error("Either text, input_ids or input_embeds should be provided.")
    if not ids:
        raise value_error("input_ids cannot be empty.")
    return (ids, True) if isinstance(ids[0], list) else ([ids], False)


def _per_item(params: Any, count: int) -> list[Mapping[str, Any]]:
    if not isinstance(params, list):
        return [params] * count
    if len(params) < count:
        raise internal_error()
    return params[:count]


def _copies(params: list[Mapping[str, Any]]) -> int:
    counts = {item.get("n", 1) for item in params}
    if len(counts) != 1:
        raise value_error("The parallel_sample_num should be the same for all samples in sample params.")
    count = counts.pop()
    if count is None:
        raise internal_error()
    return int(count)


def _check_lists(body: Mapping[str, Any], copies: int) -> None:
    name = next((name for name in PER_ITEM_LOGPROBS if isinstance(body.get(name), list)), None)
    if copies > 1 and name is not None:
        raise value_error(f"Cannot use list {name} with parallel_sample_num > 1")


def _rids(rid: Any, count: int, *, is_list: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(count)] if is_list else [rid]
    if not isinstance(rid, list):
        raise value_error("The rid should be a string or a list of strings.")
    if len(rid) != count:
        raise value_error("The specified rids length mismatch with the batch_size for batch processing.")
    duplicates = [name for name, times in Counter(rid).items() if times > 1]
    if duplicates:
        raise value_error(f"Duplicate request IDs detected within the request: {duplicates}")
    return rid


def _job(body: Mapping[str, Any], index: int, rid: str) -> Job:
    def item(name: str, default: Any) -> Any:
        value = body.get(name)
        value = value[index] if isinstance(value, list) else value
        return default if value is None else value

    ids = body.get("token_ids_logprob")
    nested = ids[index] if ids and isinstance(ids[0], list) else ids
    return Job(
        rid=rid,
        logprob=bool(item("return_logprob", default=False)),
        logprob_start=item("logprob_start_len", -1),
        top_logprobs=item("top_logprobs_num", 0),
        token_ids_logprob=None if nested is None else tuple(nested),
        logprob_text=bool(body.get("return_text_in_logprobs")),
        routed_experts=bool(item("return_routed_experts", default=False)),
        routed_start=item("routed_experts_start_len", 0),
        hidden_states=item("return_hidden_states", default=False),
        prompt_token_ids=bool(body.get("return_prompt_token_ids")),
    )


def _dp_rank(body: Mapping[str, Any], config: SimConfig) -> int | None:
    low, high = DEPRECATED_DP_RANK_IGNORED
    rank = body.get("routed_dp_rank") if config.release >= DP_RANK_SINCE else None
    if rank is None and not low <= config.release <= high:
        rank = body.get("data_parallel_rank")
    if rank is not None and not 0 <= rank < config.dp_size:
        raise value_error(f"routed_dp_rank={rank} out of range [0, {config.dp_size})")
    return None if rank is None else int(rank)


def _too_long(prompt_tokens: int, wanted: int, limit: int) -> str:
    return (
        f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total "
        f"of {prompt_tokens + wanted} tokens: {prompt_tokens} tokens from the input messages and {wanted} tokens for "
        "the completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
        "limit."
    )


def _check_extras(job: Job, config: SimConfig) -> None:
    if job.hidden_states and not config.hidden_size:
        raise value_error(
            "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
            "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
        )
    bad = next((token for token in job.token_ids_logprob or () if not 0 <= token < config.vocab_size), None)
    if bad is not None:
        raise value_error(
            f"token_ids_logprob contains out-of-vocabulary token id {bad}; valid range is [0, {config.vocab_size})."
        )


def _check_starts(job: Job, config: SimConfig) -> None:
    size = len(job.prompt)
    if job.logprob and job.logprob_start > size:
        raise value_error(_too_far("req.logprob_start_len", job.logprob_start, size))
    if not job.routed_experts or config.release < START_LEN_SINCE:
        return
    name = "recv_req.routed_experts_start_len"
    if job.routed_start < 0:
        words = f"{name}={job.routed_start} is lower than 0. Please use a non-negative routed_experts_start_len."
        raise value_error(words)
    if job.routed_start > size:
        raise value_error(_too_far(name, job.routed_start, size))


def _too_far(name: str, value: int, size: int) -> str:
    limit = f"the number of input tokens len(req.origin_input_ids)={size}"
    return f"{name}={value} is higher than {limit}. Please use a smaller {name.partition('.')[2]}."
