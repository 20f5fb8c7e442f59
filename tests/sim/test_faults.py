"""Every kind of fault, seen from the wire."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rolloutsync.sim import Fault, SimConfig, SimEngine

from .kit import WAIT_S, Caller, generation, rows, until

PROMPT = [5, 30, 70, 100]


def raw(caller: Caller, body: dict[str, Any], timeout: float = WAIT_S) -> bytes:
    """Sends a generation and returns every byte that comes until the server closes."""
    with caller.unanswered(body.pop("input_ids"), body["sampling_params"]["max_new_tokens"], rid=body["rid"]) as wire:
        wire.settimeout(timeout)
        data = b""
        while part := wire.recv(65536):
            data += part
        return data


def test_a_status_comes_with_its_headers_and_body_and_only_so_often(main: Caller) -> None:
    """Twice 503, then all is well; nothing was started by the refused calls."""
    main.engine.add_fault(
        Fault(kind="status", status=503, times=2, headers={"Retry-After": "3"}, body={"error": "busy"})
    )
    replies = [main.generate(PROMPT, 2, rid=f"r{number}") for number in range(3)]
    assert [reply.status for reply in replies] == [503, 503, 200]
    assert (replies[0].headers["retry-after"], replies[0].json) == ("3", {"error": "busy"})
    assert [row["rid"] for row in main.engine.state()["generations"]] == ["r2"]
    assert main.engine.faults() == []


def test_a_fault_can_wait_for_its_turn_and_for_its_request(main: Caller) -> None:
    """`skip` lets calls pass, `rid` and `prompt` choose, `path` names another endpoint."""
    main.engine.add_fault(Fault(kind="status", status=500, skip=1, prompt=(9, 9)))
    main.engine.add_fault(Fault(kind="status", status=502, rid="b", times=None))
    main.engine.add_fault(Fault(kind="status", status=504, path="/model_info"))
    first = [main.generate([9, 9, 9], 1, rid=rid).status for rid in ("a", "a", "a")]
    assert first == [200, 500, 200]
    assert [main.generate(PROMPT, 1, rid=rid).status for rid in ("b", "a", "b")] == [502, 200, 502]
    assert [main.get("/model_info").status for _ in range(2)] == [504, 200]
    (left,) = main.engine.faults()
    assert (left["hits"], left["left"], left["fault"]["kind"]) == (2, None, "status")
    main.engine.clear_faults(left["id"])
    assert main.generate(PROMPT, 1, rid="b").status == 200


def test_a_text_prompt_can_be_matched(main: Caller) -> None:
    """By what it contains."""
    main.engine.add_fault(Fault(kind="status", status=500, prompt="ell", body="text/plain it is"))
    calls = [{"text": text, "sampling_params": {"max_new_tokens": 1}} for text in ("hallo", "hello")]
    assert [main.post("/generate", call).status for call in calls] == [200, 500]


def test_an_unknown_fault_is_refused(main: Caller) -> None:
    """The message names the field."""
    reply = main.post("/sim/faults", {"kind": "hang", "often": 3})
    assert reply.status == 400
    assert "unknown fields of a fault: often" in reply.text


def test_a_hanging_call_is_never_answered(main: Caller) -> None:
    """With `after`, its generation runs all the same."""
    main.engine.add_fault(Fault(kind="hang", after=True))
    with main.unanswered(PROMPT, 5, rid="hung") as wire:
        main.await_row("hung", "finished")
        wire.settimeout(0.1)
        with pytest.raises(TimeoutError):
            wire.recv(1)


def test_a_dropped_connection_leaves_an_orphan(main: Caller) -> None:
    """The client sees EOF, the generation runs on to its end."""
    main.engine.add_fault(Fault(kind="drop", seconds=0.05))
    assert raw(main, generation(PROMPT, 100, rid="orphan")) == b""
    assert main.await_row("orphan", "finished", "running")["state"] == "running"
    assert main.await_row("orphan", "finished")["tokens"] == 100


@pytest.mark.parametrize(("after", "started"), [(False, 0), (True, 1)])
def test_a_reset_comes_before_or_after_the_work(main: Caller, after: bool, started: int) -> None:
    """ECONNRESET either way; the ledger knows the difference."""
    main.engine.add_fault(Fault(kind="reset", after=after))
    with pytest.raises(ConnectionResetError):
        main.generate(PROMPT, 2, rid="reset")
    assert len(rows(main.engine.state(), "reset")) == started


def test_a_truncated_answer_promises_more_than_it_sends(main: Caller) -> None:
    """The length is the true one, the body is not."""
    main.engine.add_fault(Fault(kind="truncate", bytes=60))
    with pytest.raises(http.client.IncompleteRead) as caught:
        main.generate(PROMPT, 2)
    assert len(caught.value.partial) == 60
    assert caught.value.partial.startswith(b'{"text":')


@pytest.mark.parametrize("headers_too", [False, True])
def test_a_dripping_answer_is_whole_in_the_end(main: Caller, headers_too: bool) -> None:
    """A few bytes at a time, with or without the header block."""
    main.engine.add_fault(Fault(kind="drip", bytes=100, seconds=0.02, headers_too=headers_too))
    started = time.monotonic()
    assert main.generate(PROMPT, 2).finish["type"] == "length"
    assert time.monotonic() - started > 0.06


@pytest.mark.parametrize("after", [False, True])
def test_a_delayed_answer_comes_late(main: Caller, after: bool) -> None:
    """Before or after the work."""
    main.engine.add_fault(Fault(kind="delay", seconds=0.15, after=after))
    call = main.begin_generate(PROMPT, 2, rid="late")
    started = time.monotonic()
    if after:
        main.await_row("late", "finished")
        assert not call.done()
    assert call.result(WAIT_S).finish["type"] == "length"
    assert time.monotonic() - started > 0.1


def test_an_interim_answer_precedes_the_real_one(main: Caller) -> None:
    """103, then 200 on the same connection."""
    main.engine.add_fault(Fault(kind="interim", headers={"Link": "x"}))
    with main.unanswered(PROMPT, 2) as wire:
        data = b""
        while b"200 OK" not in data:
            data += wire.recv(65536)
    assert data.startswith(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_an_answer_can_be_another_requests(main: Caller) -> None:
    """All right but for the id."""
    main.engine.add_fault(Fault(kind="wrong_id", body="somebody-else"))
    reply = main.generate(PROMPT, 2, rid="mine")
    assert reply.json["meta_info"]["id"] == "somebody-else"
    assert len(reply.ids) == 2


def test_an_error_can_come_as_200(main: Caller) -> None:
    """An object, a list or null that is no result."""
    main.engine.add_fault(Fault(kind="error_200"))
    main.engine.add_fault(Fault(kind="error_200", body=[]))
    assert "error" in main.generate(PROMPT, 2).json
    assert main.generate(PROMPT, 2).json == []


def test_a_paused_engine_can_answer_503(main: Caller) -> None:
    """Only while it is paused; otherwise it generates."""
    main.engine.add_fault(Fault(kind="paused_503", times=None))
    assert main.generate(PROMPT, 2).status == 200
    main.post("/pause_generation", {"mode": "in_place"})
    reply = main.generate(PROMPT, 2)
    assert (reply.status, reply.json["code"], reply.json["retryable"]) == (503, "paused", True)
    main.post("/continue_generation", {})
    assert main.generate(PROMPT, 2).status == 200


def test_aborts_can_be_ignored(main: Caller) -> None:
    """The third one works; all of them are counted."""
    main.engine.add_fault(Fault(kind="ignore_abort", times=2))
    call = main.begin_generate(PROMPT, 1500, rid="stubborn")
    main.await_row("stubborn", "running")
    for _ in range(2):
        assert main.post("/abort_request", {"abort_all": True}).status == 200
    assert rows(main.engine.state(), "stubborn")[0]["state"] == "running"
    main.post("/abort_request", {"abort_all": True})
    assert call.result(WAIT_S).finish["type"] == "abort"
    assert main.engine.state()["aborts"] == {"count": 3, "abort_all": 3, "ignored": 2, "rids": []}


def test_a_stuck_load_never_reaches_zero(main: Caller, old: Caller) -> None:
    """One request seems to run until the fault is cleared."""
    for caller in (main, old):
        caller.engine.add_fault(Fault(kind="stuck_load"))
        assert [caller.load()["num_running_reqs"] for _ in range(3)] == [1, 1, 1]
        caller.engine.clear_faults()
        assert caller.load()["num_running_reqs"] == 0


def test_a_frozen_scheduler_hangs_what_asks_it_and_nothing_else(main: Caller) -> None:
    """Snapshots stand still, generations and /server_info hang, /model_info answers; thawed, all goes on."""
    main.engine.add_fault(Fault(kind="freeze"))
    call = main.begin_generate(PROMPT, 5, rid="frozen")
    info = main.begin("/get_server_info")
    first, second = main.load(), main.load()
    assert first["timestamp"] == second["timestamp"]
    assert main.get("/model_info").status == 200
    assert main.get("/health").status == 503
    hung = main.begin("/flush_cache")
    main.post("/abort_request", {"rid": "nobody"})
    assert not call.done()
    assert not hung.done()
    main.engine.clear_faults()
    assert call.result(WAIT_S).finish["type"] == "length"
    assert hung.result(WAIT_S).status in {200, 400}
    assert info.result(WAIT_S).status == 405
    until(main.load, lambda load: bool(load["timestamp"] > first["timestamp"]), "a later snapshot")


def test_a_freeze_can_end_by_itself(main: Caller) -> None:
    """After so many seconds."""
    main.engine.add_fault(Fault(kind="freeze", seconds=0.1))
    assert main.engine.state()["frozen"] is True
    assert main.generate(PROMPT, 2).finish["type"] == "length"
    assert main.engine.faults() == []


def test_an_early_answer_comes_before_the_body_was_read(main: Caller) -> None:
    """413 while the client still sends; the connection is reset then."""
    main.engine.add_fault(Fault(kind="status", status=413, body="too large", early=True, seconds=0.05))
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", main.engine.port), timeout=WAIT_S) as wire:
        wire.sendall(head + b"x" * 4096)
        assert wire.recv(65536).startswith(b"HTTP/1.1 413 ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            wire.sendall(b"x" * 9_000_000)


@contextmanager
def own_engine(**fields: Any) -> Iterator[SimEngine]:
    """An engine that a test may kill."""
    engine = SimEngine(SimConfig(**fields))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def closed_without_answer(engine: SimEngine, method: str, path: str, body: Any) -> None:
    """Makes a call that the engine dies of."""
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        engine.call(method, path, body)
    engine.wait(WAIT_S)
    with pytest.raises(ConnectionRefusedError):
        engine.call("GET", "/health")


def test_a_crash_ends_the_process_at_once() -> None:
    """The connection breaks, then the port refuses."""
    with own_engine() as engine:
        engine.add_fault(Fault(kind="crash"))
        closed_without_answer(engine, "POST", "/generate", generation(PROMPT, 5))
        engine.restart()
        assert engine.state()["started"] == 0


def test_a_bad_token_id_kills_the_engine_after_a_while() -> None:
    """As with the real one; others in flight go down with it."""
    with own_engine(death_delay_s=0.1) as engine:
        started = time.monotonic()
        closed_without_answer(engine, "POST", "/generate", generation([5, 99999], 5))
        assert time.monotonic() - started > 0.1
    with own_engine(die_on_bad_token=False) as engine, pytest.raises(RuntimeError, match="400"):
        engine.call("POST", "/generate", generation([5, -1], 5))


@pytest.mark.parametrize(
    "body", [{"input_ids": [[]]}, {"input_ids": [5], "return_logprob": True, "logprob_start_len": -2}]
)
def test_an_empty_prompt_and_a_start_before_the_prompt_kill_the_engine(body: dict[str, object]) -> None:
    """Nothing in the real engine stops them before its scheduler does not survive them."""
    with own_engine(death_delay_s=0.01) as engine:
        closed_without_answer(engine, "POST", "/generate", body)


def test_releasing_memory_kills_a_busy_engine() -> None:
    """Both calls break."""
    with own_engine(death_delay_s=0.05) as engine:
        wire = socket.create_connection(("127.0.0.1", engine.port), timeout=WAIT_S)
        with wire:
            body = json.dumps(generation(PROMPT, 5000)).encode()
            wire.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            until(engine.state, lambda state: bool(state["running"]), "a running request")
            closed_without_answer(engine, "POST", "/release_memory_occupation", {})
            assert wire.recv(10) == b""


def test_flushing_with_new_weights_kills_a_busy_engine_before_0_5_22() -> None:
    """An assertion in the scheduler; later versions answer 400."""
    with own_engine(version="0.5.21", death_delay_s=0.05) as engine:
        wire = socket.create_connection(("127.0.0.1", engine.port), timeout=WAIT_S)
        with wire:
            body = json.dumps(generation(PROMPT, 5000)).encode()
            wire.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            until(engine.state, lambda state: bool(state["running"]), "a running request")
            engine.call("POST", "/pause_generation", {"mode": "in_place"})
            closed_without_answer(engine, "POST", "/update_weights_from_disk", {"model_path": "next"})
