"""How a simulated answer is compared with a recorded one: keys and types, and the protocol's words to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .kit import Caller, Reply

DATA = Path(__file__).with_name("data")
PARTIAL = ("model_info", "server_info")
WITH_METRICS_ON = {
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
}
BY_CHANCE = {"finish_reason", "checksums", "top_logprobs"}
EXACT = ("error", "detail", "object", "type", "code", "param", "success")


def shape(value: Any) -> Any:
    """Keys and types; None stands for anything, and a list for its first item."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key not in WITH_METRICS_ON}
        return {key: None if key in BY_CHANCE else shape(inner) for key, inner in kept.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else None
    if value is None or isinstance(value, bool | str):
        return None if value is None else type(value).__name__
    return "number"


def differences(real: Any, simulated: Any, path: str = "") -> list[str]:
    """Where two shapes are not the same."""
    if real is None or simulated is None or real == simulated:
        return []
    if isinstance(real, dict) and isinstance(simulated, dict):
        missing = [f"{path} lacks {sorted(real.keys() - simulated.keys())}"] * bool(real.keys() - simulated.keys())
        extra = [f"{path} has {sorted(simulated.keys() - real.keys())}"] * bool(simulated.keys() - real.keys())
        both = real.keys() & simulated.keys()
        return (
            missing + extra + [text for key in both for text in differences(real[key], simulated[key], f"{path}.{key}")]
        )
    if isinstance(real, list) and isinstance(simulated, list):
        return differences(real[0], simulated[0], f"{path}[0]")
    return [f"{path} is {simulated}, not {real}"]


def load(name: str) -> dict[str, Any]:
    """The recordings of one engine."""
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return loaded


def check(recorded: dict[str, Any], reply: Reply, name: str) -> None:
    """Compares an answer with the recorded one."""
    assert reply.status == recorded["status"], reply.text
    assert reply.headers.get("content-type") == recorded["content_type"]
    if "names" in recorded:
        assert [line.split()[2] for line in reply.text.splitlines() if line.startswith("# TYPE")] == recorded["names"]
    elif "text" in recorded:
        assert reply.text == recorded["text"]
    else:
        compare(recorded["json"], reply.json, partial=any(word in name for word in PARTIAL))


def compare(real: Any, simulated: Any, *, partial: bool = False) -> None:
    """Compares two bodies: shapes everywhere, values where they are words of the protocol."""
    found = differences(shape(real), shape(simulated))
    if partial:
        found = [text for text in found if " lacks " not in text]
    assert not found, found
    if isinstance(real, dict):
        assert {key: real[key] for key in EXACT if key in real and short(real[key])} == {
            key: simulated[key] for key in EXACT if key in real and short(real[key])
        }


def short(value: Any) -> bool:
    """Whether a recorded value was kept whole."""
    return not str(value).endswith(("...", "...'}"))


def replay(caller: Caller, recorded: dict[str, Any]) -> Reply:
    """Makes the recorded call."""
    call = recorded["request"]
    body = call["body"]
    if isinstance(body, dict) and body.get("input_ids") == "5 * 3000":
        body = body | {"input_ids": [5] * 3000}
    data = body.encode() if isinstance(body, str) else body
    return caller.call(call["method"], call["path"], data, call.get("headers"))
