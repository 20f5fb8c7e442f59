"""Recorded exchanges with a real vLLM, as they are kept in ``tests/data/vllm/<engine version>/``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from rolloutsync.dialects.base import Facts
from rolloutsync.dialects.vllm import VLLMDialect
from rolloutsync.sample import Prompt, Segment

from .golden import Recorded
from .makers import ids

_DATA = Path(__file__).parent.parent / "data" / "vllm"
VERSION = "0.32.0"
FACTS = Facts(version=VERSION)
DIALECT = VLLMDialect()


def recorded(name: str) -> Recorded:
    """The exchange of that name."""
    raw = json.loads((_DATA / VERSION / f"{name}.json").read_text())
    sent, got = raw["request"], raw["response"]
    body = orjson.dumps(got["json"]) if "json" in got else got["text"].encode()
    return Recorded(sent["method"], sent["path"], sent["body"], got["status"], body)


def all_recorded() -> list[str]:
    """The name of every recorded exchange."""
    return sorted(path.stem for path in (_DATA / VERSION).glob("*.json"))


def prompt_of(exchange: Recorded) -> Prompt:
    """The prompt whose fields say what was asked for in that request."""
    body = exchange.request
    sampling = body.get("sampling_params", body)
    fields: dict[str, Any] = {}
    if sampling.get("logprobs") is not None:
        fields["return_logprob"] = True
    if sampling.get("prompt_logprobs") is not None:
        fields["logprob_start_len"] = 0
    return Prompt(input_ids=ids(*(body.get("token_ids") or body["prompt"])), fields=fields)


def rid_of(answer: Any) -> str:
    """Our part of the id that the answer bears."""
    told = answer.get("request_id") or answer["id"]
    return str(told).removeprefix("generate-tokens-").removeprefix("cmpl-")


def decoded(name: str, *, prompt: Prompt | None = None, facts: Facts = FACTS, dtype: str = "auto") -> Segment:
    """The recorded answer, decoded as the answer to its own request."""
    exchange = recorded(name)
    asked = prompt_of(exchange) if prompt is None else prompt
    return DIALECT.decode_generate(exchange.answer, asked, rid_of(exchange.answer), facts, dtype)
