"""The JSON that answers a generation, in the form of the engine's version."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pybase64

from rolloutsync.sim import tokens
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.jobs import START_LEN_SINCE, Job
from rolloutsync.sim.request import SimRequest
from rolloutsync.sim.stream import Model, TokenStream
from rolloutsync.sim.tokens import Hashes

VERSION_SINCE = (0, 5, 1)
QUEUED_OUTPUT_SINCE = (0, 5, 5)
DP_RANK_SINCE = (0, 5, 10)
RETRACTIONS_SINCE = (0, 5, 12)
PROMPT_IDS_SINCE = (0, 5, 13)
SPANS_SINCE = (0, 5, 19)
EXPERTS_SINCE = (0, 5, 7)

Meta = dict[str, Any]


class Answers:
    """Makes the answers of one engine. Immutable."""

    def __init__(self, config: SimConfig, model: Model) -> None:
        self._config = config
        self._release = config.release
        self._model = model

    def finished(self, job: Job, request: SimRequest, latency_s: float, sent_at: float) -> Meta:
        """Returns the answer of a generation that has ended."""
        if request.while_queued and self._release < QUEUED_OUTPUT_SINCE:
            return self._queued_before_output(job)
        meta = self._queued_meta(job, request) if request.while_queued else self._meta(job, request, request.count)
        if self._release >= SPANS_SINCE:
            spans = request.stream.versions(request.count)
            meta["weight_version"] = spans[-1][0]
            meta["weight_versions"] = [{"version": name, "start": low, "end": high} for name, low, high in spans]
        if not request.while_queued:
            self._add_extras(meta, job, request)
        meta |= {"finish_reason": request.finish, "e2e_latency": latency_s, "response_sent_to_client_ts": sent_at}
        return self._whole(job, request, request.count, meta, final=True)

    def partial(self, job: Job, request: SimRequest, count: int) -> Meta:
        """Returns a streamed chunk: everything so far, and no reason to finish."""
        request.stream.grow(count)
        return self._whole(job, request, count, self._meta(job, request, count), final=False)

    def _whole(self, job: Job, request: SimRequest, count: int, meta: Meta, *, final: bool) -> Meta:
        stream = request.stream
        answer: Meta = {"text": stream.text(count, final=final), "output_ids": stream.tokens[:count]}
        if job.prompt_token_ids and self._release >= PROMPT_IDS_SINCE:
            answer["prompt_token_ids"] = job.prompt
        return answer | {"meta_info": meta}

    def _queued_before_output(self, job: Job) -> Meta:
        reason = {"type": "abort", "message": "Abort before prefill"}
        meta = {"id": job.rid, "finish_reason": reason, "prompt_tokens": 0, "completion_tokens": 0}
        return {"text": "", "meta_info": meta}

    def _queued_meta(self, job: Job, request: SimRequest) -> Meta:
        meta: Meta = {"id": job.rid, "finish_reason": None}
        self._add_version(meta, request)
        meta["completion_tokens"] = request.count
        if job.logprob:
            self._add_output_logprobs(meta, job, request.stream, request.count, [])
            self._add_alternatives(meta, job, request.stream, request.count, range(0))
        return meta

    def _meta(self, job: Job, request: SimRequest, count: int) -> Meta:
        meta: Meta = {"id": job.rid, "finish_reason": None, "prompt_tokens": len(job.prompt)}
        self._add_version(meta, request)
        meta["num_retractions" if self._release >= RETRACTIONS_SINCE else "total_retractions"] = request.retractions
        if job.logprob:
            self._add_logprobs(meta, job, request.stream, count)
        cached = request.cached_tokens
        details = {"device": cached, "host": 0} if cached and self._release >= DP_RANK_SINCE else None
        meta |= {"completion_tokens": count, "cached_tokens": cached, "cached_tokens_details": details}
        if self._release >= DP_RANK_SINCE:
            meta |= {"reasoning_tokens": 0, "dp_rank": request.rank if self._config.dp_size > 1 else None}
        return meta

    def _add_version(self, meta: Meta, request: SimRequest) -> None:
        if self._release >= VERSION_SINCE:
            meta["weight_version"] = request.stream.version

    # Log-probabilities

    def _add_logprobs(self, meta: Meta, job: Job, stream: TokenStream, count: int) -> None:
        start = job.logprob_start
        positions = range(start, len(job.prompt)) if start >= 0 else range(0)
        if start < 0 and self._release < RETRACTIONS_SINCE:
            inputs: list[Any] = [[None, job.prompt[-1], self._text(job, job.prompt[-1])]]
        else:
            inputs = self._input_logprobs(job, stream, positions)
        self._add_output_logprobs(meta, job, stream, count, inputs)
        self._add_alternatives(meta, job, stream, count, positions)

    def _add_alternatives(self, meta: Meta, job: Job, stream: TokenStream, count: int, positions: range) -> None:
        if job.top_logprobs:
            self._add_top(meta, job, stream, count, positions)
        if job.token_ids_logprob is not None:
            self._add_chosen(meta, job, stream, count, positions)

    def _add_output_logprobs(self, meta: Meta, job: Job, stream: TokenStream, count: int, inputs: list[Any]) -> None:
        ids = stream.tokens[:count]
        meta["input_token_logprobs"] = inputs
        meta["output_token_logprobs"] = self._triples(job, stream.logprobs(count), ids)
        if self._release >= DP_RANK_SINCE:
            meta["output_token_logprobs_length"] = count

    def _input_logprobs(self, job: Job, stream: TokenStream, positions: range) -> list[Any]:
        if not positions:
            return []
        first, ids = job.prompt[positions[0]], job.prompt[positions[0] + 1 :]
        before = stream.prompt_prefixes[positions[0] + 1 : -1]
        values = tokens.logprobs(before, ids, tokens.text_key(stream.spans[0][1]))
        return [(None, first, self._text(job, first)), *self._triples(job, values, ids)]

    def _add_top(self, meta: Meta, job: Job, stream: TokenStream, count: int, positions: range) -> None:
        before = stream.prompt_prefixes[positions[0] + 1 : -1] if positions else stream.prompt_prefixes[:0]
        meta["input_top_logprobs"] = ([None] if positions else []) + self._top(job, before, stream.spans[0][1])
        meta["output_top_logprobs"] = [
            row
            for version, low, high in stream.versions(count)
            for row in self._top(job, stream.hashes(count)[low:high], version)
        ]

    def _top(self, job: Job, before: Hashes, version: str) -> list[Any]:
        key = tokens.text_key(version)
        values, ids = tokens.top_logprobs(before, job.top_logprobs, key, self._config.vocab_size)
        return [self._triples(job, row, row_ids) for row, row_ids in zip(values, ids, strict=True)]

    def _add_chosen(self, meta: Meta, job: Job, stream: TokenStream, count: int, positions: range) -> None:
        before = stream.prompt_prefixes[positions[0] + 1 : -1] if positions else stream.prompt_prefixes[:0]
        rows = self._chosen(job, before, stream.spans[0][1])
        meta["input_token_ids_logprobs"] = ([None] if positions else []) + rows
        meta["output_token_ids_logprobs"] = [
            row
            for version, low, high in stream.versions(count)
            for row in self._chosen(job, stream.hashes(count)[low:high], version)
        ]

    def _chosen(self, job: Job, before: Hashes, version: str) -> list[Any]:
        ids, key = list(job.token_ids_logprob or ()), tokens.text_key(version)
        columns = [tokens.logprobs(before, [token] * len(before), key) for token in ids]
        return [self._triples(job, list(row), ids) for row in zip(*columns, strict=True)]

    def _triples(self, job: Job, values: list[float], ids: list[int]) -> list[Any]:
        if job.logprob_text:
            return [(value, token, self._text(job, token)) for value, token in zip(values, ids, strict=True)]
        return list(zip(values, ids, [None] * len(ids), strict=True))

    def _text(self, job: Job, token: int) -> str | None:
        return self._model.tokenizer.decode([token], special=True) if job.logprob_text else None

    # What the model was doing meanwhile

    def _add_extras(self, meta: Meta, job: Job, request: SimRequest) -> None:
        shape, stream = self._config.routed_experts, request.stream
        if job.routed_experts and self._release >= EXPERTS_SINCE:
            if shape is not None:
                start = job.routed_start if self._release >= START_LEN_SINCE else 0
                meta["routed_experts"] = _base64(stream.prefixes(request.count)[1 + start : -1], shape)
            elif self._release < DP_RANK_SINCE:
                meta["routed_experts"] = None
        if job.hidden_states:
            meta["hidden_states"] = self._hidden_states(job, request)

    def _hidden_states(self, job: Job, request: SimRequest) -> list[Any]:
        after = request.stream.prefixes(request.count)[1:]
        rows = tokens.hidden_states(after[: len(job.prompt) + max(0, request.count - 1)], self._config.hidden_size)
        if job.hidden_states == "last":
            return rows[-1:]
        return [rows[: len(job.prompt)], *rows[len(job.prompt) :]]


def _base64(after: Hashes, shape: tuple[int, int, int]) -> orjson.Fragment:
    experts = np.ascontiguousarray(tokens.routed_experts(after, *shape))
    return orjson.Fragment(b'"' + pybase64.b64encode(experts.tobytes()) + b'"')
