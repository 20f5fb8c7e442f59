"""The JSON of vLLM's generation answers, in the form of the engine's version: whole ones and the chunks of streams."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pybase64

from rolloutsync.sim import tokens
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.request import SimRequest
from rolloutsync.sim.stream import Model
from rolloutsync.sim.vllm_engine import VllmJob
from rolloutsync.sim.vllm_logprobs import Logprobs
from rolloutsync.sim.vllm_request import Call

COMPLETION_EXPERTS_SINCE = (0, 21, 0)
EXPERTS_SINCE = (0, 22, 0)
HEAD_SINCE = (0, 26, 0)
MASK_SINCE = (0, 28, 0)
PROMPT_IDS_SINCE = (0, 30, 0)
SCORES_SINCE = (0, 31, 0)
SPANS_SINCE = (0, 32, 0)
COMPLETION_SPANS_SINCE = (0, 33, 0)

Json = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """The tokens from `start` to `end` of one generation, and whether its last one is among them."""

    index: int
    job: VllmJob
    request: SimRequest
    start: int
    end: int
    final: bool

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return self.request.stream.tokens[self.start : self.end]

    @property
    def ending(self) -> Json:
        """Why it ended, or that it has not."""
        finish = self.request.finish if self.final else None
        assert finish is None or isinstance(finish, dict)
        matched = (finish or {}).get("matched")
        reason = None if matched == tokens.EOS_TOKEN_ID else matched
        return {"finish_reason": finish and finish["type"], "stop_reason": reason}

    @property
    def text(self) -> str:
        """The text of its tokens."""
        stream = self.request.stream
        before = stream.text(self.start, final=False) if self.start else ""
        return stream.text(self.end, final=self.final)[len(before) :]

    def spans(self) -> list[Json]:
        """The weight versions of everything up to its end."""
        spans = self.request.stream.versions(self.end)
        return [{"version": name, "start": low, "end": high} for name, low, high in spans if low < high]


class Answers:
    """What both endpoints of one engine have in common. Immutable."""

    def __init__(self, config: SimConfig, model: Model) -> None:
        self.config = config
        self.release = config.release
        self.logprobs = Logprobs(config, model)
        self.fingerprint = f"vllm-{config.version}-simulated"

    def usage(self, call: Call, pieces: Sequence[Piece]) -> Json:
        """Token counts of a call; the samples of a prompt count it once."""
        prompt = sum(len(piece.job.prompt) for piece in pieces if piece.index % call.n == 0)
        completion = sum(piece.end for piece in pieces)
        usage = _counts(prompt, completion)
        usage["prompt_tokens_details"] = self._details(pieces[-1].request.cached_tokens)
        return usage | ({"completion_tokens_details": None} if self.release >= MASK_SINCE else {})

    def _details(self, cached: int) -> Json | None:
        if not self.config.enable_prompt_tokens_details:
            return None
        if self.release >= HEAD_SINCE:
            return {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
        return {"cached_tokens": cached} if cached else None

    def last_usage(self, call: Call, pieces: Sequence[Piece]) -> Json:
        """The same at the end of a stream, without what is null."""
        usage = {name: value for name, value in self.usage(call, pieces).items() if value is not None}
        if (details := usage.get("prompt_tokens_details")) is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": details["cached_tokens"]}
        return usage

    def experts(self, piece: Piece) -> orjson.Fragment | None:
        """The experts of every token but the last as an .npy file in base64, of the narrowest type."""
        shape = self.config.routed_experts
        rows = piece.request.stream.prefixes(piece.end)[1 + piece.job.routed_start : -1]
        if shape is None or piece.request.while_queued:
            return None
        return _npy(tokens.routed_experts(rows, *shape), shape[2])


class TokenAnswers(Answers):
    """The answers of `/inference/v1/generate`."""

    def whole(self, call: Call, pieces: Sequence[Piece]) -> Json:
        """Returns the answer of a call that has ended."""
        release = self.release
        head: Json = {"request_id": call.outer}
        if release >= HEAD_SINCE:
            head |= {"model": self.config.model_path, "created": int(time.time()), "usage": self.usage(call, pieces)}
        head["prompt_logprobs"] = self.logprobs.of_prompt(pieces[0].job, pieces[0].request)
        if release >= SCORES_SINCE:
            head |= {"prompt_token_id_logprobs": None, "metrics": None}
        if release >= PROMPT_IDS_SINCE:
            ids = list(pieces[0].job.prompt) if call.token_ids else None
            head |= {"prompt_token_ids": ids, "mm_placeholders": None}
        head |= {"kv_transfer_params": None} | ({"ec_transfer_params": None} if release >= HEAD_SINCE else {})
        if release >= SPANS_SINCE:
            head["output_mode"] = call.mode
        return head | {"choices": [self._choice(call, piece) for piece in pieces]}

    def chunk(self, call: Call, piece: Piece, *, first: bool) -> Json:
        """Returns what a stream adds."""
        chunk: Json = {"request_id": call.outer, "usage": None}
        if call.usage_in_chunks:
            chunk["usage"] = _counts(len(piece.job.prompt), piece.end) | {"prompt_tokens_details": None}
            chunk["usage"] |= {"completion_tokens_details": None} if self.release >= MASK_SINCE else {}
        if self.release >= SPANS_SINCE:
            chunk["output_mode"] = call.mode
        if first and not piece.index and call.token_ids and self.release >= PROMPT_IDS_SINCE:
            chunk["prompt_token_ids"] = list(piece.job.prompt)
        return chunk | {"choices": [self._choice(call, piece)]}

    def last(self, call: Call, pieces: Sequence[Piece]) -> Json:
        """Returns the chunk behind the last token."""
        usage = self.last_usage(call, pieces)
        mode = {"output_mode": call.mode} if self.release >= SPANS_SINCE else {}
        return {"request_id": call.outer, "choices": [], "usage": usage} | mode

    def _choice(self, call: Call, piece: Piece) -> Json:
        release, whole = self.release, piece.final and not piece.start
        choice: Json = {"index": piece.index, "finish_reason": piece.ending["finish_reason"]}
        if release >= SPANS_SINCE:
            choice["stop_reason"] = piece.ending["stop_reason"]
        choice["token_ids"] = piece.ids
        if release >= EXPERTS_SINCE:
            choice["routed_experts"] = self.experts(piece) if piece.final else None
        if release >= MASK_SINCE:
            choice["sampling_mask"] = None
        if release >= SPANS_SINCE:
            choice["weight_versions"] = piece.spans() if piece.final else None
        if call.mode == "text":
            choice["text"] = piece.text
        wanted = piece.job.num_logprobs is not None
        return choice | {"logprobs": self._shape(call, piece) if wanted and (whole or piece.ids) else None}

    def _shape(self, call: Call, piece: Piece) -> Json:
        place = (piece.job, piece.request, piece.start, piece.end)
        if self.release >= SPANS_SINCE and call.mode == "tokens":
            return self.logprobs.by_id(*place)
        return self.logprobs.as_in_chats(*place, words=call.mode == "text")


class CompletionAnswers(Answers):
    """The answers of `/v1/completions`."""

    def whole(self, call: Call, pieces: Sequence[Piece]) -> Json:
        """Returns the answer of a call that has ended."""
        release = self.release
        whole = self._head(call) | {"choices": [self._whole_choice(call, piece) for piece in pieces]}
        whole |= {"service_tier": None, "system_fingerprint": self._fingerprint, "usage": self.usage(call, pieces)}
        whole["kv_transfer_params"] = None
        return whole | ({"ec_transfer_params": None, "metrics": None} if release >= HEAD_SINCE else {})

    def chunk(self, call: Call, piece: Piece, *, first: bool) -> Json:
        """Returns what a stream adds."""
        echo = call.echoes[piece.index // call.n] if first and call.echoes else ""
        choice: Json = {"index": piece.index, "text": echo + piece.text, "logprobs": self._logprobs(call, piece)}
        choice |= piece.ending
        choice["prompt_token_ids"] = list(piece.job.prompt) if first and call.token_ids else None
        choice["token_ids"] = piece.ids if call.token_ids else None
        if piece.final and self.release >= COMPLETION_SPANS_SINCE:
            choice["weight_versions"] = piece.spans() if call.weight_versions else None
        chunk = self._head(call) | {"choices": [choice]}
        if piece.final and not call.usage_at_end and self._fingerprint:
            chunk["system_fingerprint"] = self._fingerprint
        return chunk | ({"usage": _counts(len(piece.job.prompt), piece.end)} if call.usage_in_chunks else {})

    def last(self, call: Call, pieces: Sequence[Piece]) -> Json:
        """Returns the chunk behind the last token."""
        usage = self.last_usage(call, pieces)
        return self._head(call) | {"choices": [], "usage": usage, "system_fingerprint": self._fingerprint}

    @property
    def _fingerprint(self) -> str | None:
        return self.fingerprint if self.release >= COMPLETION_EXPERTS_SINCE else None

    def _head(self, call: Call) -> Json:
        head = {"id": call.outer, "object": "text_completion"}
        return head | {"created": int(time.time()), "model": self.config.model_path}

    def _whole_choice(self, call: Call, piece: Piece) -> Json:
        echo = call.echoes[piece.index // call.n] if call.echoes else ""
        choice: Json = {"index": piece.index, "text": echo + piece.text, "logprobs": self._logprobs(call, piece)}
        choice |= piece.ending
        choice["token_ids"] = piece.ids if call.token_ids else None
        choice["prompt_logprobs"] = self.logprobs.of_prompt(piece.job, piece.request)
        choice["prompt_token_ids"] = list(piece.job.prompt) if call.token_ids else None
        if self.release >= COMPLETION_EXPERTS_SINCE:
            choice["routed_experts"] = self.experts(piece)
        if self.release >= COMPLETION_SPANS_SINCE:
            choice["weight_versions"] = piece.spans() if call.weight_versions else None
        return choice

    def _logprobs(self, call: Call, piece: Piece) -> Json | None:
        if piece.job.num_logprobs is None:
            return None
        return self.logprobs.by_text(piece.job, piece.request, piece.start, piece.end, as_ids=call.tokens_as_ids)


def _counts(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _npy(experts: np.ndarray[Any, Any], num_experts: int) -> orjson.Fragment:
    kind = np.uint8 if num_experts <= 2**8 else np.uint16 if num_experts <= 2**16 else np.int32
    file = io.BytesIO()
    np.save(file, experts.astype(kind))
    return orjson.Fragment(b'"' + pybase64.b64encode(file.getvalue()) + b'"')
