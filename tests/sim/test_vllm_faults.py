"""Faults on the face that speaks vLLM, and what a hanging or dying core looks like from outside."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rolloutsync.sim import Fault, SimConfig, SimFleet
from rolloutsync.sim.tokens import expected_tokens

from .kit import WAIT_S
from .vllm_kit import GENERATE, VllmCaller, asked, choice, ids, problem

pytestmark = pytest.mark.slow

PROMPT = [5, 30, 70]


def test_a_core_that_hangs(vllm: VllmCaller) -> None:
    """Health and load answer, a pause does not; an abort ends the request at once; the core then goes on."""
    call = vllm.begin_running(PROMPT, "stuck")
    number = vllm.engine.add_fault(Fault(kind="freeze"))
    pause = vllm.begin("/pause?mode=keep")
    late = vllm.begin_tokens(PROMPT, 3, request_id="late")
    vllm.await_state(lambda state: state["in_flight"] == 2, "both in flight")
    assert vllm.get("/health").status == vllm.get("/version").status == 200
    assert vllm.get("/load").json == {"server_load": 2}
    vllm.abort("generate-tokens-stuck", "generate-tokens-late")
    got = ids(call.result(WAIT_S))
    assert got == expected_tokens(PROMPT, len(got), vocab_size=512)
    assert ids(late.result(WAIT_S)) == []
    assert vllm.counts() == (1, 0)
    assert not pause.done()
    vllm.engine.clear_faults(number)
    assert pause.result(WAIT_S).json == {"status": "paused"}
    assert vllm.engine.state()["running"] == 0
    vllm.post("/resume")
    assert len(ids(vllm.tokens(PROMPT, 3))) == 3


def test_a_core_that_dies(pool: ThreadPoolExecutor) -> None:
    """In flight: 500, whole or in the middle of a stream; health says 503; then the server is gone."""
    with SimFleet(engines=1, dialect="vllm", death_delay_s=0.3) as fleet:
        caller = VllmCaller(fleet.engines[0], pool)
        whole = caller.begin_running(PROMPT, "whole")
        stream = caller.begin_running(PROMPT, "stream", stream=True)
        fleet.engines[0].add_fault(Fault(kind="crash"))
        assert problem(caller.tokens(PROMPT, 2)) == (500, "InternalServerError", None)
        assert problem(whole.result(WAIT_S)) == (500, "InternalServerError", None)
        assert caller.get("/health").status == 503
        assert '"type":"InternalServerError"' in stream.result(WAIT_S).text
        assert fleet.engines[0].wait(WAIT_S) == 17
        with pytest.raises(ConnectionRefusedError):
            caller.get("/health")


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault(kind="status", status=429), 429),
        (Fault(kind="error_200"), 200),
        (Fault(kind="status", status=500, path=GENERATE), 500),
        (Fault(kind="status", status=500, rid="mine"), 500),
        (Fault(kind="status", status=500, prompt=(5, 30)), 500),
    ],
)
def test_a_fault_hits_generations_in_either_form(vllm: VllmCaller, fault: Fault, status: int) -> None:
    """By default the paths that generate; by path, id or prompt those that match."""
    vllm.engine.add_fault(fault)
    assert vllm.tokens([9], 1, request_id="other").status in ({200, status} if fault.rid or fault.prompt else {status})
    reply = vllm.tokens(PROMPT, 1, request_id="mine")
    assert reply.status == status if fault.rid or fault.prompt else reply.status == 200


def test_a_fault_finds_a_request_by_its_header(vllm: VllmCaller) -> None:
    """And by its prompt in a completion."""
    vllm.engine.add_fault(Fault(kind="status", status=418, rid="mine"))
    assert vllm.call("POST", GENERATE, asked(PROMPT, 1), {"X-Request-Id": "mine"}).status == 418
    vllm.engine.add_fault(Fault(kind="status", status=418, prompt="hello"))
    assert [vllm.complete(text, max_tokens=1).status for text in ("bye", "hello you")] == [200, 418]


def test_an_abort_can_be_forgotten(vllm: VllmCaller) -> None:
    """It says that it was done."""
    call = vllm.begin_running(PROMPT, "X")
    vllm.engine.add_fault(Fault(kind="ignore_abort", rid="X"))
    assert vllm.abort("generate-tokens-X") == 1
    assert vllm.engine.state()["running"] == 1
    vllm.abort("generate-tokens-X")
    assert choice(call.result(WAIT_S))["finish_reason"] == "abort"
    assert vllm.engine.state()["aborts"]["ignored"] == 1


def test_an_answer_can_have_anothers_id(vllm: VllmCaller) -> None:
    """In both forms."""
    vllm.engine.add_fault(Fault(kind="wrong_id", times=2))
    assert vllm.tokens(PROMPT, 1).json["request_id"] == vllm.complete(PROMPT, max_tokens=1).json["id"] == "0" * 32


def test_a_pause_can_be_pretended_to_refuse(recorded: VllmCaller) -> None:
    """Only in a pause, in vLLM's words."""
    recorded.engine.add_fault(Fault(kind="paused_503"))
    assert len(ids(recorded.tokens(PROMPT, 1))) == 1
    recorded.post("/pause?mode=keep")
    assert problem(recorded.tokens(PROMPT, 1)) == (503, "ServiceUnavailableError", None)


def test_a_load_can_be_stuck(vllm: VllmCaller) -> None:
    """One that runs, for ever."""
    number = vllm.engine.add_fault(Fault(kind="stuck_load"))
    assert vllm.counts() == (1, 0)
    vllm.engine.clear_faults(number)
    assert vllm.counts() == (0, 0)


def test_weights_can_be_stale(vllm: VllmCaller) -> None:
    """The version is new, the checksum is not."""
    vllm.engine.add_fault(Fault(kind="stale_weights"))
    before = vllm.post("/weight_checker", {"action": "checksum"}).json
    for path, body in _update("9"):
        assert vllm.post(path, body).status == 200
    assert vllm.get("/weight_info").json == {"weight_version": "9"}
    assert vllm.post("/weight_checker", {"action": "checksum"}).json == before


def _update(version: str) -> list[tuple[str, Any]]:
    return [
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {}}),
        ("/finish_weight_update", {"weight_version": version}),
    ]


def test_a_dropped_call_goes_on_unattended(vllm: VllmCaller) -> None:
    """Until it is aborted by its id."""
    vllm.engine.add_fault(Fault(kind="drop"))
    with pytest.raises((ConnectionError, OSError)):
        vllm.tokens(PROMPT, 1900, request_id="orphan")
    vllm.await_row("orphan", "running")
    vllm.abort("generate-tokens-orphan")
    vllm.await_row("orphan", "aborted")


def test_steps_can_be_made_longer(vllm: VllmCaller) -> None:
    """Through the simulation's own path, on this face as well."""
    vllm.engine.slow_down(0.05)
    started = time.monotonic()
    vllm.tokens(PROMPT, 4)
    assert time.monotonic() - started >= 0.15


def test_a_fleet_can_have_both_faces() -> None:
    """They say the same to the same prompt."""
    with SimFleet(configs=[SimConfig(vocab_size=512), SimConfig(vocab_size=512, dialect="vllm")]) as fleet:
        sglang, vllm = fleet.engines
        one = sglang.call("POST", "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}})
        two = vllm.call("POST", GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}})
        assert one["output_ids"] == two["choices"][0]["token_ids"]
