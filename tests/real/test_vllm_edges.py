"""vLLM at its edges: with a core that hangs, without its flags, and killed. The last test ends the module's engine."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest
import requests

from .launch import RealEngine
from .raw import WAIT_S
from .raw_vllm import COMPLETIONS, GENERATE, RawVllm, answered, generation, raw_vllm
from .test_vllm_contract import PROMPT, only, refused
from .test_vllm_control import cut
from .vllm import frozen, process

pytestmark = pytest.mark.real

HANGS_S = 1.0


@pytest.fixture
def engine(vllm: RealEngine) -> Iterator[RawVllm]:
    """The engine with dev mode, scale-out and load tracking."""
    with raw_vllm(vllm.url) as made:
        yield made


@pytest.fixture
def plain(plain_vllm: RealEngine) -> Iterator[RawVllm]:
    """The engine without all that."""
    with raw_vllm(plain_vllm.url) as made:
        yield made


# Frozen: the front end answers for a core that does not.


def hangs(engine: RawVllm, path: str) -> None:
    """Sees that there is no answer."""
    with pytest.raises(requests.ReadTimeout):
        engine.get(path, timeout=HANGS_S)


def test_a_frozen_core_shows_only_where_it_is_asked_itself(engine: RawVllm, vllm: RealEngine) -> None:
    """Health, loads and aborts are answered for it, with partial samples; what is put to the core hangs. So answered
    aborts and a count of zero do not prove that a core is idle: a round trip to it does."""
    rid, other = uuid4().hex, uuid4().hex
    calls = [engine.begin(rid), engine.begin(other)]
    engine.await_counts(running=2)
    with frozen(vllm):
        hangs(engine, "/is_paused")  # so the core has come to where it waits for the worker
        for path in ("/health", "/version", "/load", "/metrics", "/v1/models", "/get_world_size"):
            assert engine.get(path).status_code == 200
        engine.abort(f"generate-tokens-{rid}")
        engine.abort_all()
        assert [cut(answered(call)) > 0 for call in calls] == [True, True]
        assert (engine.abort_all(), engine.load(), engine.counts()) == (0, 0, (2, 0))
        for path in ("/weight_info", "/is_sleeping"):
            hangs(engine, path)
        with pytest.raises(requests.ReadTimeout):
            engine.post("/pause?mode=abort", timeout=HANGS_S)
    engine.await_counts(0)
    assert engine.get("/is_paused").json() == {"is_paused": True}  # the call that timed out was carried out
    engine.resume()


# Without the flags.


def test_there_is_no_control_without_dev_mode(plain: RawVllm) -> None:
    """404 without the engine's usual shape of an error."""
    calls = ("/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc")
    weights = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
    for path in itertools.chain(calls, weights):
        answer = plain.post(path, {})
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    for path in ("/is_paused", "/is_sleeping", "/server_info", "/weight_info", "/get_world_size"):
        assert plain.get(path).status_code == 404
    assert plain.get("/version").status_code == plain.get("/health").status_code == 200


def test_the_route_of_tokens_is_forbidden_without_scale_out(plain: RawVllm) -> None:
    """403 with a word about the flag; the OpenAI route serves ids there, too."""
    answer = plain.post(GENERATE, generation("x", 1, PROMPT))
    assert "--enable-scale-out" in refused(answer, 403)
    assert answer.json()["error"]["type"] == "PermissionDeniedError"
    assert plain.get(GENERATE).status_code == 405
    assert only(plain.complete())["prompt_token_ids"] == PROMPT


def test_load_is_not_counted_without_its_flag(plain: RawVllm) -> None:
    """0 whatever runs: only the gauges tell."""
    call = plain.begin_completion({"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True})
    plain.await_counts(running=1)
    assert plain.load() == 0
    answered(call)


def test_the_header_is_echoed_with_its_flag(plain: RawVllm) -> None:
    """A request named in its body gets an unrelated one."""
    body = {"prompt": PROMPT, "max_tokens": 1, "request_id": "from-the-body"}
    answer = plain.post(COMPLETIONS, body, {"X-Request-Id": "from-the-header"})
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-from-the-header", "from-the-header")
    answer = plain.post(COMPLETIONS, body)
    assert answer.json()["id"] == "cmpl-from-the-body"
    assert "from-the-body" not in answer.headers["x-request-id"]


def test_a_killed_worker_takes_the_server_along(plain: RawVllm, plain_vllm: RealEngine) -> None:
    """The request in flight is a 500, then connections are refused."""
    call = plain.begin_completion({"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True})
    plain.await_counts(running=1)
    os.kill(process(plain_vllm, "VLLM::Worker"), signal.SIGKILL)
    assert "EngineCore encountered an issue" in refused(call.result(WAIT_S), 500)
    deadline = time.monotonic() + 10.0
    while answers(plain):
        assert time.monotonic() < deadline, "the server outlives its worker"
        time.sleep(0.05)


def answers(engine: RawVllm) -> bool:
    try:
        engine.get("/health")
    except requests.ConnectionError:
        return False
    return True
