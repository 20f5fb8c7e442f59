"""Recorded answers of real engines, and what the simulated ones say to the same calls."""

from __future__ import annotations

import json
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from .kit import WAIT_S, Caller, Reply, events, generation

DATA = Path(__file__).with_name("data")
NEW: dict[str, Any] = json.loads((DATA / "sglang-0.5.23.json").read_text())
OLD: dict[str, Any] = json.loads((DATA / "sglang-0.5.9.json").read_text())
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
BY_CHANCE = {"finish_reason", "checksums"}
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
    return caller.call(call["method"], call["path"], body.encode() if isinstance(body, str) else body)


@pytest.mark.parametrize("name", NEW["replay"])
def test_the_newest_version_answers_as_recorded(main: Caller, name: str) -> None:
    """Status, content type, keys, types and the protocol's own words."""
    check(NEW["replay"][name], replay(main, NEW["replay"][name]), name)


@pytest.mark.parametrize("name", OLD["replay"])
def test_version_0_5_9_answers_as_recorded(old: Caller, name: str) -> None:
    """The same for the oldest version that was recorded."""
    check(OLD["replay"][name], replay(old, OLD["replay"][name]), name)


@pytest.mark.parametrize(("version", "data"), [("main", NEW), ("old", OLD)])
def test_aborted_answers_have_the_recorded_form(
    request: pytest.FixtureRequest, version: str, data: dict[str, Any]
) -> None:
    """Running requests come back with what they have, waiting ones with nothing but their id."""
    caller: Caller = request.getfixturevalue(version)
    experts = {"return_routed_experts": True} if version == "main" else {}
    calls = [
        caller.begin_generate([5, 30, 70], 1800, rid=f"L{number}", return_logprob=True, **experts)
        for number in range(6)
    ]
    caller.await_state(lambda state: (state["running"], state["waiting"]) == (4, 2), "four running, two waiting")
    caller.post("/abort_request", {"abort_all": True})
    replies = sorted((call.result(WAIT_S) for call in calls), key=lambda reply: len(reply.ids))
    for reply in replies[:2]:
        check(data["other"]["abortall_4"], reply, "abort")
        assert reply.finish == data["other"]["abortall_4"]["json"]["meta_info"]["finish_reason"]
    for reply in replies[2:]:
        check(data["other"]["abortall_0"], reply, "abort")
        assert reply.finish == data["other"]["abortall_0"]["json"]["meta_info"]["finish_reason"]


@pytest.mark.parametrize(("version", "data"), [("main", NEW), ("old", OLD)])
def test_streams_have_the_recorded_form(request: pytest.FixtureRequest, version: str, data: dict[str, Any]) -> None:
    """Every chunk holds everything so far; the last event is no JSON."""
    caller: Caller = request.getfixturevalue(version)
    recorded = data["other"]["generate_stream"]
    reply = replay(caller, recorded)
    assert reply.headers["content-type"] == recorded["content_type"]
    got, real = events(reply), recorded["events"]
    assert got[-1] == real[-1] == "[DONE]"
    compare(optional_time(real[0]), optional_time(got[0]))
    compare(optional_time(real[-2]), optional_time(got[-2]))


def optional_time(event: dict[str, Any]) -> dict[str, Any]:
    """An event without the time stamp that only some chunks carry."""
    meta = {key: value for key, value in event["meta_info"].items() if key != "response_sent_to_client_ts"}
    return event | {"meta_info": meta}


@pytest.mark.parametrize(("version", "data"), [("main", NEW), ("old", OLD)])
def test_a_busy_engine_refuses_to_flush(request: pytest.FixtureRequest, version: str, data: dict[str, Any]) -> None:
    """Older versions say the same text for yes and no; the status tells."""
    caller: Caller = request.getfixturevalue(version)
    call = caller.begin_generate([5, 6], 1800, rid="busy")
    caller.await_row("busy", "running")
    check(data["other"]["flush_cache_busy"], caller.post("/flush_cache"), "flush")
    if version == "old":
        check(data["other"]["get_load_busy"], caller.get("/get_load"), "load")
        check(data["other"]["loads_core_busy"], caller.get("/v1/loads?include=core"), "load")
        assert caller.load()["num_running_reqs"] == 1
    caller.post("/abort_request", {"rid": "busy"})
    assert call.result(WAIT_S).finish["type"] == "abort"


def test_a_rid_in_use_and_a_full_queue_are_refused_as_recorded(main: Caller, queue: Caller) -> None:
    """400 and 503, in two different shapes."""
    first = main.begin_generate([5, 6], 600, rid="dup")
    main.await_row("dup", "running")
    check(NEW["other"]["dup_rid_second"], main.generate([5, 6], 8, rid="dup"), "dup")
    calls = [queue.begin("/generate", generation([5, 6], 40)) for _ in range(5)]
    refused = [reply for call in calls if (reply := call.result(WAIT_S)).status != 200]
    assert refused
    for reply in refused:
        check(NEW["other"]["queuefull_7"], reply, "queue")
    main.post("/abort_request", {"rid": "dup"})
    wait([first], WAIT_S)


def test_pause_and_continue_answer_as_recorded(main: Caller) -> None:
    """Both are content with an empty object."""
    check(NEW["other"]["pause_emptyobj"], main.post("/pause_generation", {}), "pause")
    check(NEW["other"]["continue_emptyobj"], main.post("/continue_generation", {}), "continue")
