"""Answers of an engine, made once: only the request's id is put in between two parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pybase64

from benchmarks.harness.work import EXPERTS, VOCABULARY, Shape

RID_CHARS = 32
_MARK = "0" * RID_CHARS
_HEAD = (
    "HTTP/1.1 {status} OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    "content-length: {size}\r\ncontent-type: application/json\r\n\r\n"
)


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer but for the id, which is ``RID_CHARS`` long."""

    before: bytes
    after: bytes

    def small(self, rid: bytes) -> bytes:
        """As one piece."""
        return b"".join((self.before, rid, self.after))


def plain_answer(value: Any) -> bytes:
    """An HTTP answer with ``value`` as JSON."""
    body = orjson.dumps(value)
    return _HEAD.format(status=200, size=len(body)).encode() + body


def generate_answer(shape: Shape) -> Answer:
    """SGLang's answer to ``/generate``."""
    body = orjson.dumps(completion(shape, _MARK))
    before, mark, after = body.partition(_MARK.encode())
    assert mark
    return Answer(_HEAD.format(status=200, size=len(body)).encode() + before, after)


def completion(shape: Shape, rid: str) -> dict[str, Any]:
    """The same as a value."""
    chance = np.random.default_rng(shape.tokens)
    ids = chance.integers(0, VOCABULARY, shape.tokens).tolist()
    logprobs = (-chance.exponential(1.0, shape.tokens)).astype(np.float32).astype(np.float64).tolist()
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": "length", "length": shape.tokens},
        "prompt_tokens": shape.prompt_tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": shape.tokens,
        "completion_tokens": shape.tokens,
        "cached_tokens": 0,
        "dp_rank": None,
        "e2e_latency": 1.0,
    }
    if shape.layers:
        experts = chance.integers(0, EXPERTS, shape.rows * shape.layers * shape.topk, dtype=np.int32)
        meta["routed_experts"] = pybase64.b64encode(experts.tobytes()).decode()
    return {"text": "word " * min(shape.tokens, 40), "output_ids": ids, "meta_info": meta}


def loads(running: int, now: float) -> dict[str, Any]:
    """SGLang's answer to ``/v1/loads``."""
    rank = {
        "dp_rank": 0,
        "timestamp": now,
        "num_running_reqs": running,
        "num_waiting_reqs": 0,
        "num_used_tokens": running,
        "num_total_tokens": running,
    }
    return {"timestamp": now, "dp_rank_count": 1, "loads": [rank]}


def server_info(model_path: str) -> dict[str, Any]:
    """SGLang's answer to ``/server_info``."""
    return {"version": "0.5.23", "dp_size": 1, "tp_size": 1, "max_running_requests": 4096, "model_path": model_path}


def model_config(shape: Shape) -> dict[str, Any]:
    """The model's ``config.json``, where trainers find the shape of its routing."""
    return {
        "num_hidden_layers": shape.layers or 48,
        "num_experts_per_tok": shape.topk,
        "num_experts": EXPERTS,
        "vocab_size": VOCABULARY + 2,
    }
