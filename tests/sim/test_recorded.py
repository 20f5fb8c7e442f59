"""Recorded answers of real engines, and what the simulated ones say to the same calls."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest

from .kit import WAIT_S, Caller, events, generation
from .recorded import check, compare, load, replay

NEW, OLD = load("sglang-0.5.23"), load("sglang-0.5.9")


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
