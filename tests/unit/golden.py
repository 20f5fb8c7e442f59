"""Recorded exchanges with real engines, as they are kept in ``tests/data/sglang/<engine version>/``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rolloutsync.dialects.base import Facts
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.payload import parse_json
from rolloutsync.sample import Prompt, Segment

from .makers import ids

_DATA = Path(__file__).parent.parent / "data" / "sglang"


@dataclass(frozen=True)
class Recorded:
    """One exchange."""

    method: str
    path: str
    request: Any
    status: int
    body: bytes

    @property
    def answer(self) -> Any:
        """The answer as the library parses it."""
        return parse_json(self.body)


def recorded(name: str, version: str = "0.5.23") -> Recorded:
    """The exchange of that name."""
    raw = json.loads((_DATA / version / f"{name}.json").read_text())
    sent, got = raw["request"], raw["response"]
    body = orjson.dumps(got["json"]) if "json" in got else got["text"].encode()
    return Recorded(sent["method"], sent["path"], sent["body"], got["status"], body)


def all_recorded(prefix: str = "") -> list[tuple[str, str]]:
    """(version, name) of every recorded exchange whose name begins with ``prefix``."""
    return sorted((path.parent.name, path.stem) for path in _DATA.glob(f"*/{prefix}*.json"))


def prompt_of(exchange: Recorded) -> Prompt:
    """The prompt that would have made that request."""
    body = dict(exchange.request)
    tokens, text, sampling = body.pop("input_ids", None), body.pop("text", None), body.pop("sampling_params")
    body.pop("rid", None)
    return Prompt(input_ids=None if tokens is None else ids(*tokens), text=text, sampling_params=sampling, fields=body)


def decoded(name: str, version: str = "0.5.23", *, facts: Facts | None = None, dtype: str = "auto") -> Segment:
    """The recorded answer, decoded as the answer to its own request."""
    exchange = recorded(name, version)
    rid = exchange.answer["meta_info"]["id"]
    known = Facts(version=version) if facts is None else facts
    return SGLangDialect().decode_generate(exchange.answer, prompt_of(exchange), rid, known, dtype)
