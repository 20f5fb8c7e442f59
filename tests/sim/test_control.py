"""The control plane over HTTP: pauses, weights, loads, memory, health and keys."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from typing import Any

import pytest

from rolloutsync.sim import Fault, SimEngine
from rolloutsync.sim.tokens import expected_tokens

from .kit import WAIT_S, Caller, Reply, until

PROMPT = [5, 30, 70, 100]
VOCAB = 512


def test_a_pause_in_abort_mode_waits_for_every_answer(main: Caller) -> None:
    """Running and waiting requests are answered before it returns; new ones wait."""
    calls = [main.begin_generate(PROMPT, 1500) for _ in range(6)]
    main.await_state(lambda state: (state["running"], state["waiting"]) == (4, 2), "four running, two waiting")
    assert main.post("/pause_generation", {"mode": "abort"}).status == 200
    assert main.engine.state()["in_flight"] == 0
    assert {call.result(WAIT_S).finish["type"] for call in calls} == {"abort"}
    parked = main.begin_generate(PROMPT, 3, rid="parked")
    main.await_row("parked", "parked")
    main.post("/continue_generation", {})
    assert parked.result(WAIT_S).finish["type"] == "length"


def test_a_pause_freezes_the_snapshot_and_a_live_load_moves_on(main: Caller, old: Caller) -> None:
    """0.5.13+ shows the last numbers throughout a retract pause; 0.5.9 shows the request in the queue."""
    for caller in (main, old):
        caller.begin_generate(PROMPT, 1500, rid="held")
        until(caller.load, lambda load: bool(load["num_running_reqs"]), "a running request")
        caller.post("/pause_generation", {"mode": "retract"})
    first, second = main.load(), main.load()
    assert first == second
    assert first["num_running_reqs"] == 1
    assert (old.load()["num_running_reqs"], old.load()["num_waiting_reqs"]) == (0, 1)
    assert main.post("/flush_cache").status == 200


def test_an_unknown_mode_is_refused(main: Caller) -> None:
    """With the words of a validation error."""
    reply = main.post("/pause_generation", {"mode": "softly"})
    assert reply.status == 400
    assert reply.json["object"] == "error"


def test_flushing_can_wait_for_an_idle_moment(main: Caller) -> None:
    """`timeout=` gives a busy engine that long."""
    main.begin_generate(PROMPT, 100, rid="short")
    main.await_row("short", "running")
    assert main.post("/flush_cache?timeout=0.01").text == "Timed out waiting for idle state."
    assert main.post("/flush_cache?timeout=10").status == 200


def test_weights_change_the_tokens_that_follow(main: Caller) -> None:
    """A request that is held in place has two spans, each of its own version."""
    version = main.get("/model_info").json["weight_version"]
    call = main.begin_generate(PROMPT, 100, rid="spans", return_logprob=True)
    main.await_state(lambda state: state["tokens"] > 10, "ten tokens")
    main.post("/pause_generation", {"mode": "in_place"})
    body = {"model_path": "next", "weight_version": "w2", "flush_cache": False}
    assert main.post("/update_weights_from_disk", body).json["success"] is True
    main.post("/continue_generation", {})
    reply = call.result(WAIT_S)
    (first, second) = reply.json["meta_info"]["weight_versions"]
    cut = first["end"]
    assert [first["version"], second["version"], second["end"]] == [version, "w2", 100]
    head = expected_tokens(PROMPT, cut, version=version, vocab_size=VOCAB)
    assert reply.ids == head + expected_tokens(PROMPT + head, 100 - cut, version="w2", vocab_size=VOCAB)
    assert main.get("/model_info").json["weight_version"] == reply.json["meta_info"]["weight_version"] == "w2"


def test_an_update_waits_for_running_requests_and_holds_new_ones_back(main: Caller) -> None:
    """Without a pause, the update is the one that waits."""
    running = main.begin_generate(PROMPT, 60, rid="before")
    main.await_row("before", "running")
    update = main.begin("/update_weights_from_disk", {"model_path": "next", "weight_version": "w3"})
    main.await_state(lambda state: state["requests"].get("/update_weights_from_disk") == 1, "the update")
    after = main.begin_generate(PROMPT, 5, rid="after")
    assert update.result(WAIT_S).json["success"] is True
    assert running.done()
    assert running.result().json["meta_info"]["weight_version"] != "w3"
    assert after.result(WAIT_S).json["meta_info"]["weight_version"] == "w3"


def test_an_update_may_abort_everything_first(main: Caller) -> None:
    """Then it does not wait for long."""
    running = main.begin_generate(PROMPT, 1500, rid="before")
    main.await_row("before", "running")
    body = {"model_path": "next", "weight_version": "w4", "abort_all_requests": True}
    assert main.post("/update_weights_from_disk", body).status == 200
    assert running.result(WAIT_S).finish["type"] == "abort"


def test_a_flush_that_cannot_be_fails_an_update_that_happened(main: Caller) -> None:
    """0.5.22 and later: 400, and the new weights are there all the same."""
    main.begin_generate(PROMPT, 1500, rid="held")
    main.await_row("held", "running")
    main.post("/pause_generation", {"mode": "in_place"})
    reply = main.post("/update_weights_from_disk", {"model_path": "next", "weight_version": "w5"})
    assert reply.status == 400
    assert "the cache was not flushed" in reply.json["message"]
    assert main.get("/model_info").json["weight_version"] == "w5"


def test_tensors_and_broadcasts_want_a_session(main: Caller, mid: Caller) -> None:
    """From 0.5.21 on between begin and end; before, the endpoints of a session do not exist."""
    tensor = {"serialized_named_tensors": ["AAAA"], "weight_version": "t1"}
    assert "must run between" in main.post("/update_weights_from_tensor", tensor).json["message"]
    assert main.post("/end_weight_update", {}).status == 400
    assert main.post("/begin_weight_update", {}).status == 200
    assert main.post("/begin_weight_update", {}).status == 400
    assert main.post("/update_weights_from_tensor", tensor).json == {
        "success": True,
        "message": "Success Weight version updated to t1.",
    }
    assert main.post("/end_weight_update", {}).status == 200
    assert mid.post("/begin_weight_update", {}).status == 404
    assert mid.post("/update_weights_from_tensor", tensor).status == 200


def test_a_broadcast_wants_its_group(mid: Caller) -> None:
    """Init, update, destroy; out of order it is a 400."""
    call = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2]], "group_name": "g", "weight_version": "d1"}
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    assert mid.post("/update_weights_from_distributed", call).status == 400
    assert mid.post("/init_weights_update_group", group).json["success"] is True
    assert mid.post("/update_weights_from_distributed", call).json["success"] is True
    assert mid.get("/model_info").json["weight_version"] == "d1"
    assert mid.post("/destroy_weights_update_group", {"group_name": "g"}).status == 200
    assert mid.post("/destroy_weights_update_group", {"group_name": "g"}).status == 400


def test_the_checksum_tells_weights_from_labels(main: Caller, ranks: Caller) -> None:
    """Engines that loaded the same agree; one that only changed its label does not."""

    def checksum(caller: Caller) -> str:
        return str(caller.post("/weights_checker", {"action": "checksum"}).json["per_engine_checksum"])

    for caller in (main, ranks):
        caller.post("/update_weights_from_disk", {"model_path": "same"})
    assert checksum(main) == checksum(ranks)
    main.engine.add_fault(Fault(kind="stale_weights"))
    for caller in (main, ranks):
        assert caller.post("/update_weights_from_disk", {"model_path": "other", "weight_version": "o"}).status == 200
    assert checksum(main) != checksum(ranks)
    assert main.get("/model_info").json["weight_version"] == "o"


def test_a_new_label_aborts_by_default(main: Caller) -> None:
    """`/update_weight_version` is not as harmless as it sounds."""
    running = main.begin_generate(PROMPT, 1500, rid="r")
    main.await_row("r", "running")
    assert main.post("/update_weight_version", {"new_version": "label"}).json["new_version"] == "label"
    assert running.result(WAIT_S).finish["type"] == "abort"


def test_ranks_have_a_load_each(ranks: Caller) -> None:
    """Own numbers, own time stamps; updates and flushes reach all of them."""
    for number in range(5):
        ranks.begin_generate(PROMPT, 1500, rid=f"r{number}", routed_dp_rank=1)
    ranks.await_state(lambda state: (state["running"], state["waiting"]) == (4, 1), "a busy rank")
    loads = until(
        lambda: ranks.get("/v1/loads?include=core").json["loads"],
        lambda loads: bool(loads[1]["num_running_reqs"] == 4),
        "the busy rank",
    )
    assert [load["dp_rank"] for load in loads] == [0, 1]
    assert [load["num_running_reqs"] for load in loads] == [0, 4]
    assert loads[0]["timestamp"] != loads[1]["timestamp"]
    assert [load["dp_rank"] for load in ranks.get("/v1/loads?dp_rank=1").json["loads"]] == [1]
    assert len(ranks.get("/server_info").json["internal_states"]) == 2


def test_both_load_endpoints_exist_in_between(mid: Caller) -> None:
    """0.5.13 to 0.5.20: snapshots and /get_load."""
    assert "timestamp" in mid.load()
    assert mid.get("/get_load").json[0]["num_reqs"] == 0
    assert mid.get("/ready").status == 404
    assert mid.post("/v1/loads").json == {"detail": "Method Not Allowed"}


def test_memory_is_released_and_resumed_once(main: Caller) -> None:
    """The second release is refused."""
    statuses = [main.post(path, {}).status for path in ("/release_memory_occupation",) * 2]
    assert statuses == [200, 400]
    assert main.post("/resume_memory_occupation", {}).text == "null"
    assert main.post("/release_memory_occupation", {}).status == 200
    assert main.post("/resume_memory_occupation", {}).status == 200


def test_health_generates_and_so_fails_in_a_pause(main: Caller) -> None:
    """/ping and /model_info still answer; /ready says no at once."""
    assert [main.get(path).status for path in ("/health", "/ping", "/ready")] == [200, 200, 200]
    main.post("/pause_generation", {"mode": "in_place"})
    assert [main.get(path).status for path in ("/ready", "/ping", "/model_info")] == [503, 200, 200]
    assert main.get("/health").status == 503
    assert main.get("/ping").status == 503
    main.post("/continue_generation", {})
    assert [main.get(path).status for path in ("/health", "/ping", "/ready")] == [200, 200, 200]


USER, BOSS = {"Authorization": "Bearer user"}, {"Authorization": "bearer boss"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/model_info", {}, 401),
        ("GET", "/model_info", USER, 200),
        ("GET", "/model_info", BOSS, 401),
        ("GET", "/v1/loads", USER, 200),
        ("POST", "/abort_request", USER, 401),
        ("POST", "/abort_request", BOSS, 200),
        ("POST", "/flush_cache", {"Authorization": "Basic Ym9zcw=="}, 401),
        ("GET", "/health", {}, 200),
        ("GET", "/ready", {}, 200),
    ],
)
def test_keys_open_what_they_are_for(
    keys: Caller, method: str, path: str, headers: Mapping[str, str], status: int
) -> None:
    """The user's key is for generating, the admin's for control, and health is open."""
    reply = keys.call(method, path, {} if method == "POST" else None, headers)
    assert reply.status == status
    if status == 401:
        assert reply.json == {"error": "Unauthorized"}


def test_a_slowed_down_engine_takes_its_time(main: Caller) -> None:
    """Each step gets longer, until told otherwise."""
    main.engine.slow_down(0.05)
    started = time.monotonic()
    main.generate(PROMPT, 5)
    assert time.monotonic() - started > 0.2
    assert main.post("/slow_down", {"forward_sleep_time": None}).text == "null"


def test_an_idle_connection_is_closed_by_the_server(pool: Any) -> None:
    """After keep_alive_s, so that a client must be quicker."""
    engine = SimEngine(config_with_short_keep_alive())
    engine.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=WAIT_S)
        connection.request("GET", "/ping")
        assert connection.getresponse().read() == b""
        assert connection.sock is not None
        started = time.monotonic()
        assert connection.sock.recv(1) == b""
        assert 0.1 < time.monotonic() - started < 2.0
        connection.close()
    finally:
        engine.stop()


def config_with_short_keep_alive() -> Any:
    """Settings with a keep-alive of 0.3 s."""
    from rolloutsync.sim import SimConfig

    return SimConfig(keep_alive_s=0.3)


def test_replies_are_read_whole() -> None:
    """The suite's own answer type does what its tests rely on."""
    assert Reply(200, {}, b'{"a": 1}').json == {"a": 1}
