"""A simulated vLLM engine's control plane: aborts, pauses, sleep, weights, and what its numbers say meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rolloutsync.sim.tokens import expected_tokens

from .kit import WAIT_S, until
from .vllm_kit import COMPLETIONS, GENERATE, VllmCaller, asked, choice, ids, problem

pytestmark = pytest.mark.slow

PROMPT = [5, 30, 70]
PAUSED = (503, "ServiceUnavailableError", None)


def expected(count: int) -> list[int]:
    """What the model says after the prompt."""
    return expected_tokens(PROMPT, count, vocab_size=512)


# Aborts


@pytest.mark.parametrize("name", ["X", "generate-tokens-", "generate-tokens-X-0", "cmpl-X-0"])
def test_an_abort_by_another_id_ends_nothing(vllm: VllmCaller, name: str) -> None:
    """Though it says that it did: it counts what it was told."""
    call = vllm.begin_running(PROMPT, "X")
    assert vllm.abort(name) == 1
    assert vllm.engine.state()["running"] == 1
    assert vllm.abort("generate-tokens-X") == 1
    assert choice(call.result(WAIT_S))["finish_reason"] == "abort"
    assert vllm.engine.state()["aborts"]["rids"] == [name, "generate-tokens-X"]


def test_an_abort_comes_back_with_the_tokens_so_far(vllm: VllmCaller) -> None:
    """As many as there are, and the row tells the same."""
    call = vllm.begin_running(PROMPT, "X")
    vllm.await_state(lambda state: state["tokens"] > 5, "some tokens")
    vllm.abort("generate-tokens-X")
    got = ids(call.result(WAIT_S))
    assert 5 < len(got) < 1900
    assert got == expected(len(got))
    assert vllm.await_row("X", "aborted")["tokens"] == len(got)


def test_all_samples_of_a_prompt_go_together(vllm: VllmCaller) -> None:
    """An abort of all counts them, and their prompt as well."""
    for everything in (False, True):
        call = vllm.begin_tokens(PROMPT, 1900, request_id="group", sampling={"n": 3})
        vllm.await_state(lambda state: state["running"] == 3, "three that run")
        assert vllm.abort(*[] if everything else ["generate-tokens-group"]) == (4 if everything else 1)
        reply = call.result(WAIT_S)
        assert [choice(reply, index)["finish_reason"] for index in range(3)] == ["abort"] * 3


def test_prompts_of_a_completion_are_aborted_one_by_one(vllm: VllmCaller) -> None:
    """By the number of each behind the id of the call, which by itself is nobody's."""
    body = {"prompt": [[5], [6]], "max_tokens": 1900, "ignore_eos": True, "request_id": "two"}
    call = vllm.begin(COMPLETIONS, body)
    vllm.await_state(lambda state: state["running"] == 2, "both run")
    assert vllm.abort("cmpl-two", "cmpl-two-1") == 2
    vllm.await_state(lambda state: state["running"] == 1, "the first runs on")
    vllm.abort("cmpl-two-0")
    assert {each["finish_reason"] for each in call.result(WAIT_S).json["choices"]} == {"abort"}


@pytest.mark.parametrize("body", [b"", b"[1]", b"{"])
def test_an_abort_wants_an_object(vllm: VllmCaller, body: bytes) -> None:
    """A 400 in the form of all errors."""
    assert problem(vllm.call("POST", "/abort_requests", body)) == (400, "Bad Request", None)


def test_a_client_that_goes_away_is_noticed_at_once(vllm: VllmCaller) -> None:
    """SGLang would look every four seconds."""
    with vllm.wire(asked(PROMPT, 1900, request_id="gone"), {}):
        vllm.await_row("gone", "running")
        left = time.monotonic()
    vllm.await_row("gone", "disconnected")
    assert time.monotonic() - left < vllm.engine.config.disconnect_poll_s / 2
    assert vllm.counts() == (0, 0)


# Pauses


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_refuses_what_is_new(vllm: VllmCaller, mode: str) -> None:
    """With a 503 that says so, in both forms, until the resume."""
    assert vllm.post(f"/pause?mode={mode}").json == {"status": "paused"}
    assert vllm.get("/is_paused").json == {"is_paused": True}
    assert problem(vllm.tokens(PROMPT, 2)) == problem(vllm.complete(PROMPT)) == PAUSED
    assert vllm.post("/resume").json == {"status": "resumed"}
    assert vllm.get("/is_paused").json == {"is_paused": False}
    assert ids(vllm.tokens(PROMPT, 2)) == expected(2)


def test_a_pause_that_keeps_goes_on_where_it_stopped(vllm: VllmCaller) -> None:
    """What comes meanwhile is queued, and can be aborted there; the metrics stand still."""
    running = vllm.begin_running(PROMPT, "kept", sampling={"max_tokens": 60})
    vllm.post("/pause?mode=keep&clear_cache=false")
    waiting, doomed = (vllm.begin_tokens(PROMPT, 3, request_id=name) for name in ("late", "doomed"))
    vllm.await_state(lambda state: state["waiting"] == 2, "two that wait")
    assert vllm.counts() == (1, 0)
    vllm.abort("generate-tokens-doomed")
    assert ids(doomed.result(WAIT_S)) == []
    assert not running.done()
    vllm.post("/resume")
    assert ids(running.result(WAIT_S)) == expected(60)
    assert ids(waiting.result(WAIT_S)) == expected(3)


def test_a_pause_that_keeps_recomputes_where_the_cache_is_cleared(vllm: VllmCaller) -> None:
    """The default: requests are preempted, and say the same all the same."""
    before = vllm.metric("num_preemptions_total")
    running = vllm.begin_running(PROMPT, "kept", sampling={"max_tokens": 60})
    vllm.post("/pause?mode=keep")
    assert vllm.engine.state()["waiting"] == 1
    vllm.post("/resume")
    assert ids(running.result(WAIT_S)) == expected(60)
    assert vllm.metric("num_preemptions_total") == before + 1


def test_a_pause_that_waits_lets_what_runs_end(recorded: VllmCaller) -> None:
    """What had to queue stays there."""
    calls = [recorded.begin_tokens(PROMPT, 60, request_id=f"w{number}") for number in range(6)]
    recorded.await_state(lambda state: (state["running"], state["waiting"]) == (4, 2), "four run, two wait")
    assert recorded.post("/pause?mode=wait").status == 200
    state = recorded.engine.state()
    assert (state["running"], state["waiting"]) == (0, 2)
    recorded.post("/resume")
    assert [ids(call.result(WAIT_S)) for call in calls] == [expected(60)] * 6


def test_a_pause_aborts_what_runs_and_what_waits(vllm: VllmCaller) -> None:
    """And is over with it; the cache is empty then, unless it was to be kept."""
    for clear, cached in (("true", 0), ("false", 32)):
        call = vllm.begin_running(PROMPT * 16, "paused")
        vllm.post(f"/pause?clear_cache={clear}")
        assert choice(call.result(WAIT_S))["finish_reason"] == "abort"
        assert vllm.counts() == (0, 0)
        vllm.post("/resume")
        assert vllm.tokens(PROMPT * 16, 1).json["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("query", ["mode=stop", "clear_cache=perhaps"])
def test_a_pause_knows_its_modes(vllm: VllmCaller, query: str) -> None:
    """Others are a 400, and no pause."""
    assert problem(vllm.post(f"/pause?{query}"))[:2] == (400, "Bad Request")
    assert vllm.get("/is_paused").json == {"is_paused": False}


# Sleep and caches


def test_an_engine_that_sleeps_queues_what_comes(vllm: VllmCaller) -> None:
    """Until all of its memory is back."""
    running = vllm.begin_running(PROMPT, "asleep")
    assert vllm.post("/sleep?level=2").json == {"status": "sleeping", "level": 2}
    assert choice(running.result(WAIT_S))["finish_reason"] == "abort"
    call = vllm.begin_tokens(PROMPT, 2, request_id="late")
    vllm.await_state(lambda state: state["waiting"] == 1, "one that waits")
    assert vllm.post("/wake_up?tags=weights").json == {"status": "sleeping", "tags": ["weights"]}
    assert vllm.get("/is_sleeping").json == {"is_sleeping": True}
    assert vllm.post("/wake_up?tags=kv_cache").json == {"status": "awake", "tags": ["kv_cache"]}
    assert ids(call.result(WAIT_S)) == expected(2)
    assert vllm.get("/is_sleeping").json == {"is_sleeping": False}
    assert problem(vllm.post("/sleep?level=3"))[0] == 400


def test_a_busy_engine_keeps_its_cache(vllm: VllmCaller) -> None:
    """It says so with a 200; preempting what runs helps."""
    call = vllm.begin_running(PROMPT, "busy", sampling={"max_tokens": 80})
    assert vllm.post("/reset_prefix_cache").json == {"success": False}
    assert vllm.post("/reset_prefix_cache?reset_running_requests=true").json == {"success": True}
    assert ids(call.result(WAIT_S)) == expected(80)


# Weights


def test_a_weight_update_is_a_session(vllm: VllmCaller) -> None:
    """Init, start, any number of updates, and a finish that may name the version."""
    sums = vllm.post("/weight_checker", {"action": "checksum"}).json["checksums"]
    for path, body in (("/update_weights", {"update_info": {}}), ("/finish_weight_update", None)):
        assert problem(vllm.post(path, body)) == (500, "InternalServerError", None)
    assert vllm.post("/init_weight_transfer_engine", {"init_info": {"world_size": 2}}).status == 200
    assert vllm.post("/start_weight_update").json == {"message": "Weight update started"}
    assert problem(vllm.post("/start_weight_update"))[0] == 500
    for name in ("a", "b"):
        assert vllm.post("/update_weights", {"update_info": {"names": [name]}}).json == {"message": "Weights updated"}
    assert vllm.post("/finish_weight_update", {"weight_version": "12"}).json == {"message": "Weight update finished"}
    assert vllm.get("/weight_info").json == {"weight_version": "12"}
    told = vllm.post("/weight_checker", {"action": "compare", "baseline": sums}).json
    assert told == {"match": False, "mismatches": sorted(sums)}
    assert ids(vllm.tokens(PROMPT, 3)) == expected_tokens(PROMPT, 3, version="12", vocab_size=512)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weight_transfer_engine", {}),
        ("/update_weights", {"updates": 1}),
        ("/update_weight_version", {"version": "1"}),
        ("/update_weight_version", {"new_version": 1}),
        ("/weight_checker", {"action": "guess"}),
        ("/weight_checker", None),
        ("/weight_checker", {"action": "compare"}),
        ("/collective_rpc", {}),
    ],
)
def test_a_missing_field_is_refused(vllm: VllmCaller, path: str, body: Any) -> None:
    """In one form or the other."""
    assert problem(vllm.post(path, body))[:2] == (400, "Bad Request")


def test_a_method_of_the_workers_can_be_called(vllm: VllmCaller) -> None:
    """Weights are loaded so, too; what no worker has is an error."""
    sums = vllm.post("/weight_checker", {"action": "checksum"}).json
    reply = vllm.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "step-3"}})
    assert reply.json == {"results": [None]}
    assert vllm.post("/weight_checker", {"action": "checksum"}).json != sums
    assert problem(vllm.post("/collective_rpc", {"method": "explode"}))[0] == 500


# What it tells


def test_it_counts_what_it_serves(vllm: VllmCaller) -> None:
    """/load counts calls, the metrics count samples."""
    call = vllm.begin_tokens(PROMPT, 1900, sampling={"n": 2})
    until(vllm.counts, lambda counts: counts == (2, 0), "two that run")
    assert vllm.get("/load").json == {"server_load": 1}
    assert vllm.metric("kv_cache_usage_perc") > 0
    vllm.abort()
    call.result(WAIT_S)
    until(lambda: vllm.get("/load").json, lambda load: load == {"server_load": 0}, "no load")
    assert vllm.counts() == (0, 0)


def test_a_server_without_developer_mode_has_no_control(ranked: VllmCaller) -> None:
    """404, in the web framework's form; what is no control is there. It does not count its load."""
    for path in ("/pause", "/abort_requests", "/sleep", "/reset_prefix_cache", "/collective_rpc"):
        assert (ranked.post(path, {}).status, ranked.post(path, {}).json) == (404, {"detail": "Not Found"})
    assert ranked.get("/version").json == {"version": "0.33.0"}
    assert ranked.get("/load").json == {"server_load": 0}


def test_only_some_paths_want_the_key(ranked: VllmCaller) -> None:
    """Those that generate; health, metrics and control do not."""
    for path, body in ((GENERATE, asked(PROMPT, 1)), (COMPLETIONS, {"prompt": PROMPT})):
        assert (ranked.post(path, body).status, ranked.post(path, body).json) == (401, {"error": "Unauthorized"})
        assert ranked.call("POST", path, body, {"Authorization": "Bearer user"}).status == 200
    assert ranked.get("/v1/models").status == 401
    assert [ranked.get(path).status for path in ("/health", "/metrics", "/version", "/load")] == [200] * 4
