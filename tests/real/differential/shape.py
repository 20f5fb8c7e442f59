"""What is left of an answer when text, token values and timing are taken away."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

REPORT_INTERVAL = 50
OUTPUT_LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
INPUT_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
EXACT = ("prompt_tokens", "cached_tokens", "num_retractions", "reasoning_tokens")
QUEUED = "Abort in waiting queue"

Facts = dict[str, str]


def facts_of(status: int, content_type: str, data: bytes) -> Facts:
    """Returns an answer as flat facts: its status, the type at every place of its body, and what is determined."""
    facts = {"status": str(status), "content-type": content_type.partition(";")[0]}
    if not data:
        return facts | {"body": "empty"}
    if facts["content-type"] == "text/event-stream":
        return facts | _event_facts(data.decode())
    try:
        value = json.loads(data)
    except ValueError:
        return facts | _text_facts(data.decode())
    return facts | json_facts(value) | _error_facts(value)


def json_facts(value: Any) -> Facts:
    """Returns the facts of a decoded body."""
    facts = _types(value)
    for place, item in _generations(value):
        queued = item["meta_info"]["finish_reason"] and item["meta_info"]["finish_reason"].get("message") == QUEUED
        if queued:  # it may or may not have tokens, so what the lists hold is not determined
            facts = {path: type_ for path, type_ in facts.items() if not path.startswith(place) or "[" not in path}
        facts |= {f"{place}: {name}": fact for name, fact in _generation_facts(item).items()}
    return facts


def _types(value: Any) -> Facts:
    found: dict[str, set[str]] = {}
    for path, name in _walk("body", value):
        found.setdefault(path, set()).add(name)
    return {path: " or ".join(sorted(names)) for path, names in found.items()}


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    yield path, _type(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{path}.{key}", item)
    elif _is_triple(value):
        for name, item in zip(("logprob", "id", "text"), value, strict=True):
            yield from _walk(f"{path}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(f"{path}[]", item)


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and type(value[0]) in {float, type(None)}


def _generations(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    many = value if isinstance(value, list) else [value]
    for index, item in enumerate(many):
        if isinstance(item, dict) and isinstance(item.get("meta_info"), dict):
            yield (f"body[{index}]" if isinstance(value, list) else "body"), item


def _generation_facts(answer: Mapping[str, Any]) -> Facts:
    meta = answer["meta_info"]
    finish, count = meta["finish_reason"] or {"type": None}, meta["completion_tokens"]
    facts = {name: str(meta[name]) for name in EXACT if name in meta}
    facts["finish"] = json.dumps({**finish, **({"matched": _type(finish["matched"])} if "matched" in finish else {})})
    facts["tokens"] = _count(finish, count)
    facts["output_ids"] = _same(len(answer["output_ids"]), count)
    facts |= {name: _same(len(meta[name]), count) for name in OUTPUT_LISTS if name in meta}
    facts |= {f"{name} length": str(len(meta[name])) for name in INPUT_LISTS if name in meta}
    if "output_token_logprobs_length" in meta:
        facts["output_token_logprobs_length"] = _same(meta["output_token_logprobs_length"], count)
    if "weight_versions" in meta:
        facts["spans"] = _same(meta["weight_versions"][-1]["end"], count)
    if meta.get("output_token_logprobs") and finish.get("message") != QUEUED:
        facts["ids"] = str([entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"])
    return facts


def _count(finish: Mapping[str, Any], count: int) -> str:
    if finish["type"] != "abort":
        return str(count)
    if finish.get("message") == QUEUED:
        return "whole reports" if count % REPORT_INTERVAL == 0 else f"{count}, not whole reports"
    return "some" if count else "none"


def _same(length: int, count: int) -> str:
    return "as many" if length == count else f"{length} of {count}"


def _error_facts(value: Any) -> Facts:
    """The words of an error, unless they are pydantic's, which name files and lines."""
    if not isinstance(value, dict):
        return {}
    error = value.get("error", value)
    if isinstance(error, str):
        return {"message": error}
    if isinstance(error, dict) and error.get("type") != "Bad Request" and "message" in error:
        return {"message": str(error["message"])}
    return {}


def _text_facts(text: str) -> Facts:
    if text.startswith("# "):
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        return {"metrics": " ".join(sorted({line.partition("{")[0] for line in lines}))}
    return {"text": text}


def _event_facts(text: str) -> Facts:
    """A stream: how it ends, and its last object, of a batch the last of each index."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    last: dict[Any, Any] = {}
    for event in events[:-1]:
        value = json.loads(event)
        last[value.get("index")] = value
    values = [last[index] for index in sorted(last, key=str)]
    one = values[0] if len(values) == 1 else values
    return {"end": events[-1], **json_facts(one), **_error_facts(one)}
