"""What the client takes for granted about controlling vLLM, asked of the real one: aborts, loads, pauses, weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests

from .kit import Kit
from .launch import RealEngine
from .raw import POLL_S, WAIT_S
from .raw_vllm import HOLD_S, RawVllm, answered, raw_vllm
from .test_vllm_contract import PROMPT, greedy, only, refused
from .vllm import frozen

pytestmark = pytest.mark.real

RUNNING_LIMIT = 4
SOON_S = 5.0  # many times what it takes


@pytest.fixture
def engine(vllm: RealEngine) -> Iterator[RawVllm]:
    """The engine with dev mode, scale-out and load tracking."""
    with raw_vllm(vllm.url) as made:
        yield made


def rids(count: int) -> list[str]:
    return [uuid4().hex for _ in range(count)]


def fill(engine: RawVllm, waiting: int) -> list[Any]:
    """As many generations as run at once, and so many more."""
    calls = [engine.begin() for _ in range(RUNNING_LIMIT + waiting)]
    engine.await_counts(RUNNING_LIMIT, waiting)
    return calls


def cut(body: dict[str, Any]) -> int:
    """How many tokens an aborted generation has, with everything about them aligned."""
    choice = only(body)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    return len(choice["token_ids"])


def aborted(engine: RawVllm, rid: str, call: Future[requests.Response]) -> dict[str, Any]:
    """The answer of a call that has just been begun: an abort ends nothing until the front end has taken it in, which
    nothing tells; not even that the web server counts it."""
    deadline = time.monotonic() + WAIT_S
    while wait([call], timeout=POLL_S).not_done:
        assert time.monotonic() < deadline, f"{engine.url} does not abort {rid}"
        engine.abort(f"generate-tokens-{rid}")
    return answered(call)


def still_open(call: Any) -> bool:
    """Whether a call is unanswered after a while."""
    return bool(wait([call], timeout=HOLD_S).not_done)


# Abort.


@pytest.mark.usefixtures("slow_vllm")
def test_an_aborted_running_request_answers_with_what_it_has(engine: RawVllm) -> None:
    """200, the tokens so far, a logprob for each, and the usual counts."""
    (rid,) = rids(1)
    call = engine.begin(rid)
    engine.await_counts(running=1)
    assert engine.abort(f"generate-tokens-{rid}") == 1
    body = answered(call)
    assert body["request_id"] == f"generate-tokens-{rid}"
    assert 0 < cut(body) < 2000
    assert body["usage"]["prompt_tokens"] == 3
    engine.await_counts(running=0)


@pytest.mark.usefixtures("slow_vllm")
def test_an_aborted_waiting_request_answers_empty(engine: RawVllm) -> None:
    """With its counts, unlike SGLang's; the running ones go on."""
    fill(engine, waiting=0)
    (rid,) = rids(1)
    call = engine.begin(rid)
    engine.await_counts(RUNNING_LIMIT, waiting=1)
    engine.abort(f"generate-tokens-{rid}")
    body = answered(call)
    assert cut(body) == 0
    assert body["usage"]["prompt_tokens"] == 3
    engine.await_counts(RUNNING_LIMIT)


def test_a_request_aborted_in_its_prefill_answers_empty(engine: RawVllm, vllm: RealEngine) -> None:
    """As a waiting one; it is in its first step for as long as the worker stands still."""
    (rid,) = rids(1)
    with frozen(vllm):
        call = engine.begin(rid)
        assert cut(aborted(engine, rid, call)) == 0


@pytest.mark.usefixtures("slow_vllm")
def test_only_the_exact_id_of_the_engine_is_one(engine: RawVllm) -> None:
    """Its own id for the request: not ours, and no prefix. The count echoes how many ids there were, live or not."""
    stem = uuid4().hex
    calls = [engine.begin(f"{stem}{suffix}") for suffix in ("1", "12")]
    engine.await_counts(running=2)
    assert engine.abort(f"{stem}1", f"generate-tokens-{stem}", "no-such-id") == 3
    assert still_open(calls[0])
    assert engine.abort(f"generate-tokens-{stem}1") == 1
    cut(answered(calls[0]))
    engine.await_counts(running=1)
    assert not calls[1].done()


@pytest.mark.usefixtures("slow_vllm")
def test_a_completion_is_aborted_prompt_by_prompt(engine: RawVllm) -> None:
    """`cmpl-<id>-<index>`; the id that its answer has ends nothing."""
    (rid,) = rids(1)
    body = {"prompt": [[5, 6], [7, 8]], "max_tokens": 2000, "ignore_eos": True, "request_id": rid, "logprobs": 0}
    call = engine.begin_completion({**body, "return_token_ids": True})
    engine.await_counts(running=2)
    engine.abort(f"cmpl-{rid}", rid)
    assert still_open(call)
    engine.abort(f"cmpl-{rid}-0")
    engine.await_counts(running=1)
    engine.abort(f"cmpl-{rid}-1")
    answer = answered(call)
    assert answer["id"] == f"cmpl-{rid}"
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) < 2000


@pytest.mark.usefixtures("slow_vllm")
def test_one_id_ends_all_samples_of_its_group(engine: RawVllm) -> None:
    """On both routes."""
    rid, other = rids(2)
    call = engine.begin(rid, n=3)
    engine.await_counts(running=3)
    engine.abort(f"generate-tokens-{rid}")
    assert [choice["finish_reason"] for choice in answered(call)["choices"]] == ["abort"] * 3
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "request_id": other, "n": 3}
    call = engine.begin_completion(body)
    engine.await_counts(running=3)
    engine.abort(f"cmpl-{other}-0")
    assert [choice["finish_reason"] for choice in answered(call)["choices"]] == ["abort"] * 3


@pytest.mark.usefixtures("slow_vllm")
def test_an_abort_of_all_ends_running_and_waiting_and_then_finds_none(engine: RawVllm) -> None:
    """Its count is what the front end held; zero does no harm."""
    calls = fill(engine, waiting=3)
    assert engine.abort_all() == RUNNING_LIMIT + 3
    lengths = sorted(cut(answered(call)) for call in calls)
    assert lengths[:3] == [0, 0, 0]
    assert lengths[3] > 0
    assert engine.abort_all() == 0
    assert len(greedy(engine, 2, PROMPT)) == 2


def test_bodies_of_an_abort(engine: RawVllm) -> None:
    """No body and a list are refused; an empty list means all. The other route wants ids and says nothing."""
    assert refused(engine.post("/abort_requests")) == "Invalid JSON format"
    assert "must be a JSON object" in refused(engine.post("/abort_requests", []))
    assert engine.post("/abort_requests", {"request_ids": []}).json() == {"status": "aborted", "aborted": 0}
    other = "/inference/v1/abort_requests"
    assert refused(engine.post(other, {})) == "Missing 'request_ids' in request body"
    (rid,) = rids(1)
    call = engine.begin(rid)
    engine.await_counts(running=1)
    answer = engine.post(other, {"request_ids": [f"generate-tokens-{rid}"]})
    assert (answer.status_code, answer.content) == (200, b"")
    cut(answered(call))


# Load, and what it proves.


def test_a_dropped_connection_ends_its_request(engine: RawVllm) -> None:
    """At once, be it running or waiting: the web server's count first, the core's a step later."""
    (rid,) = rids(1)
    with engine.unanswered(rid):
        engine.await_counts(running=1)
        fill_rest = [engine.begin() for _ in range(RUNNING_LIMIT)]
        engine.await_counts(RUNNING_LIMIT, waiting=1)
        begun = time.monotonic()
    engine.await_counts(RUNNING_LIMIT)
    assert time.monotonic() - begun < SOON_S
    assert engine.load() == len(fill_rest)


def test_a_request_is_in_no_gauge_until_its_first_step_has_ended(engine: RawVllm, vllm: RealEngine) -> None:
    """The web server counts it at once. The gauges are written when a step ends: an idle engine's go on to say zero
    although it has work, so zero, however often, does not speak of what arrived a moment ago."""
    with frozen(vllm):
        call = engine.begin(tokens=1900)
        engine.await_load(1)
        assert still_open(call)
        assert [engine.counts() for _ in range(5)] == [(0, 0)] * 5
    engine.await_counts(running=1)
    assert len(only(answered(call))["token_ids"]) == 1900


def test_the_gauges_stand_still_in_a_pause(engine: RawVllm) -> None:
    """What arrives in a pause runs no step: no gauge shows it, the web server's count and an abort of all do."""
    engine.pause("keep")
    call = engine.begin(tokens=4)
    engine.await_load(1)
    assert still_open(call)
    assert engine.counts() == (0, 0)
    assert engine.abort_all() == 1
    assert cut(answered(call)) == 0
    engine.await_counts(0)


# Pause.


@pytest.mark.usefixtures("slow_vllm")
def test_a_pause_in_abort_mode_returns_after_everything_was_answered(engine: RawVllm) -> None:
    """It is the default; running and waiting requests end with what they have."""
    calls = fill(engine, waiting=2)
    assert engine.post("/pause").json() == {"status": "paused"}
    assert all(cut(answered(call)) >= 0 for call in calls)
    assert engine.get("/is_paused").json() == {"is_paused": True}
    assert engine.get("/health").status_code == 200
    engine.resume()
    assert engine.get("/is_paused").json() == {"is_paused": False}


def test_a_pause_in_wait_mode_waits_for_what_runs_and_keeps_what_waits(engine: RawVllm) -> None:
    """Nothing is cut; the one that had no place yet gets it after the resume."""
    calls = [engine.begin(tokens=1900) for _ in range(RUNNING_LIMIT + 1)]
    engine.await_counts(RUNNING_LIMIT, waiting=1)
    engine.pause("wait")
    engine.await_load(1)
    (parked,) = wait(calls, timeout=HOLD_S).not_done
    engine.resume()
    assert len(only(answered(parked))["token_ids"]) == 1900
    assert [len(only(answered(call))["token_ids"]) for call in calls] == [1900] * (RUNNING_LIMIT + 1)


def test_a_pause_in_keep_mode_holds_what_runs(engine: RawVllm) -> None:
    """It ends with all its tokens after the resume."""
    call = engine.begin(tokens=1900)
    engine.await_counts(running=1)
    engine.pause("keep")
    assert still_open(call)
    engine.resume()
    assert len(only(answered(call))["token_ids"]) == 1900


@pytest.mark.usefixtures("slow_vllm")
def test_an_abort_under_a_pause_is_answered_at_once(engine: RawVllm) -> None:
    """Running, waiting and late requests alike, unlike SGLang's."""
    (late,) = rids(1)
    calls = fill(engine, waiting=1)
    engine.pause("keep")
    assert cut(aborted(engine, late, engine.begin(late))) == 0
    engine.abort_all()
    assert sum(cut(answered(call)) > 0 for call in calls) == RUNNING_LIMIT


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_request_that_arrives_in_a_pause_runs_after_it(engine: RawVllm, mode: str) -> None:
    """It waits without a word; pauses do not add up, so one resume is enough."""
    engine.pause(mode)
    engine.pause(mode)
    call = engine.begin(tokens=4)
    assert still_open(call)
    engine.resume()
    assert len(only(answered(call))["token_ids"]) == 4


def test_modes_that_there_are_not(engine: RawVllm) -> None:
    """SGLang's modes are refused; a mode in the body is not read, which is worse."""
    assert "'abort', 'wait' or 'keep'" in refused(engine.post("/pause?mode=retract"))
    call = engine.begin()
    engine.await_counts(running=1)
    assert engine.post("/pause", {"mode": "keep"}).status_code == 200
    cut(answered(call))


# Cache, sleep, weights.


def test_a_reset_of_the_cache_says_in_its_body_whether_it_was_done(engine: RawVllm) -> None:
    """200 with false while something runs; unless running requests may be reset, which do not notice."""
    assert engine.post("/reset_prefix_cache").json() == {"success": True}
    call = engine.begin(tokens=1900)
    engine.await_counts(running=1)
    assert engine.post("/reset_prefix_cache").json() == {"success": False}
    assert engine.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
    assert len(only(answered(call))["token_ids"]) == 1900


def test_sleep_and_wake(engine: RawVllm) -> None:
    """Also without --enable-sleep-mode on a CPU, where nothing is given back."""
    assert engine.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert engine.get("/is_sleeping").json() == {"is_sleeping": True}
    assert engine.post("/wake_up").json()["status"] == "awake"
    assert engine.get("/is_sleeping").json() == {"is_sleeping": False}
    assert len(greedy(engine, 2, PROMPT)) == 2


def test_weights_are_reloaded_from_a_path(engine: RawVllm, vllm_kit: Kit) -> None:
    """Other tokens after it, the first ones after the way back; the version is not touched."""
    before, version = greedy(engine, 8, PROMPT), engine.get("/weight_info").json()
    reload(engine, vllm_kit.llama_other)
    try:
        assert greedy(engine, 8, PROMPT) != before
        assert engine.get("/weight_info").json() == version
    finally:
        reload(engine, vllm_kit.llama)
    assert engine.post("/reset_prefix_cache").json() == {"success": True}
    assert greedy(engine, 8, PROMPT) == before


def reload(engine: RawVllm, path: Path) -> None:
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    assert engine.post("/collective_rpc", call).json() == {"results": [None]}


def test_a_label_splits_the_output_into_spans(engine: RawVllm) -> None:
    """Running or held, with one span for each version."""
    before = engine.get("/weight_info").json()["weight_version"]
    call = engine.begin(tokens=1900)
    engine.await_counts(running=1)
    engine.pause("keep")
    try:
        answer = engine.post("/update_weight_version", {"new_version": "next"})
        assert answer.json() == {"success": True, "new_version": "next"}
        engine.resume()
        first, second = only(answered(call))["weight_versions"]
    finally:  # what comes next counts on the label
        assert engine.post("/update_weight_version", {"new_version": before}).status_code == 200
    assert (first["version"], first["start"], second["version"], second["end"]) == (before, 0, "next", 1900)
    assert first["end"] == second["start"]


def test_an_update_has_a_beginning_and_an_end(engine: RawVllm) -> None:
    """Its calls out of order are a 500 that says which is missing; the end sets the version."""
    empty: dict[str, object] = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
    assert "start_weight_update must be called before" in refused(engine.post("/update_weights", empty), 500)
    assert "without a matching start_weight_update" in refused(engine.post("/finish_weight_update", {}), 500)
    before = engine.get("/weight_info").json()["weight_version"]
    engine.pause("keep")
    assert engine.post("/start_weight_update").json() == {"message": "Weight update started"}
    assert "already active" in refused(engine.post("/start_weight_update"), 500)
    answer = engine.post("/finish_weight_update", {"weight_version": "7"})
    assert answer.json() == {"message": "Weight update finished"}
    engine.resume()
    assert engine.get("/weight_info").json() == {"weight_version": "7"}
    assert len(greedy(engine, 2, PROMPT)) == 2
    assert engine.post("/update_weight_version", {"new_version": before}).status_code == 200


def test_the_way_of_the_weights_is_checked_when_it_is_opened(engine: RawVllm) -> None:
    """What NCCL wants to know; on a CPU there is no more to be had."""
    words = refused(engine.post("/init_weight_transfer_engine", {"init_info": {}}), 500)
    assert "'rank_offset' and 'world_size'" in words
    assert "Field required" in refused(engine.post("/init_weight_transfer_engine", {}))
    assert engine.get("/get_world_size").json() == {"world_size": 1}
