"""What the versions of vLLM have and have not, without a server."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from starlette.routing import Route

from rolloutsync.sim import SimConfig
from rolloutsync.sim.request import SimRequest
from rolloutsync.sim.routes import Table
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.stream import TokenStream
from rolloutsync.sim.vllm_answers import CompletionAnswers, Piece, TokenAnswers
from rolloutsync.sim.vllm_engine import VllmEngine, VllmJob
from rolloutsync.sim.vllm_request import Call
from rolloutsync.sim.vllm_routes import add_routes

from .kit import WAIT_S

PROMPT = [5, 6]
RELEASES = ("0.12", "0.13", "0.16", "0.22", "0.26", "0.27", "0.28", "0.30", "0.32", "0.33")
FIRST_OF = {
    "/v1/completions": "0.12",
    "/health": "0.12",
    "/metrics": "0.12",
    "/load": "0.12",
    "/sleep": "0.12",
    "/collective_rpc": "0.12",
    "/server_info": "0.12",
    "/inference/v1/generate": "0.13",
    "/pause": "0.13",
    "/resume": "0.13",
    "/is_paused": "0.13",
    "/init_weight_transfer_engine": "0.16",
    "/update_weights": "0.16",
    "/get_world_size": "0.16",
    "/start_weight_update": "0.22",
    "/finish_weight_update": "0.22",
    "/abort_requests": "0.26",
    "/weight_info": "0.27",
    "/update_weight_version": "0.27",
    "/inference/v1/abort_requests": "0.32",
    "/weight_checker": "0.32",
}
CONTROL = {"/pause", "/resume", "/is_paused", "/abort_requests", "/sleep", "/update_weights", "/weight_info"}


def engine(version: str, **fields: Any) -> VllmEngine:
    """An engine of this version, in this process."""
    return VllmEngine(SimConfig(dialect="vllm", version=version, vocab_size=512, **fields))


def paths(version: str, **fields: Any) -> set[str]:
    """What it answers."""
    table = Table(engine(version, **fields))
    add_routes(table)
    return {route.path for route in table.routes if isinstance(route, Route)}


@pytest.mark.parametrize("version", RELEASES)
def test_each_path_is_there_from_its_version_on(version: str) -> None:
    """And not before."""
    number = RELEASES.index
    assert paths(version) & set(FIRST_OF) == {
        path for path, first in FIRST_OF.items() if number(first) <= number(version)
    }


def test_without_developer_mode_there_is_no_control() -> None:
    """Whatever the version."""
    assert not paths("0.33", dev_mode=False) & CONTROL
    assert paths("0.33", dev_mode=False) >= {"/v1/completions", "/inference/v1/generate", "/health", "/metrics"}


@pytest.mark.parametrize(("version", "there"), [("0.28", True), ("0.30", False), ("0.31", False), ("0.32", True)])
def test_without_scale_out_tokens_are_absent_or_forbidden(version: str, there: bool) -> None:
    """Up to 0.29 nobody asks for the flag, then the path is missing without it, and from 0.32 on it is forbidden."""
    assert ("/inference/v1/generate" in paths(version, enable_scale_out=False)) is there


def piece(simulated: VllmEngine) -> Piece:
    """A generation of three tokens that has ended."""
    job = VllmJob(rid="r", prompt=PROMPT, outer="o", caller="c", sampling=Sampling(ignore_eos=True), num_logprobs=1)
    stream = TokenStream(simulated.model, PROMPT, job.sampling, 3, "default")
    stream.grow(3)
    request = SimRequest("r", PROMPT, stream, lambda: None, count=3, finish={"type": "length", "length": 3})
    return Piece(0, job, request, 0, 3, final=True)


def answers(version: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both endpoints say about it."""
    simulated = engine(version, routed_experts=(1, 2, 8), **fields)
    call, ended = Call(outer="o", jobs=(), n=1), piece(simulated)
    tokens = TokenAnswers(simulated.config, simulated.model).whole(call, [ended])
    return tokens, CompletionAnswers(simulated.config, simulated.model).whole(call, [ended])


@pytest.mark.parametrize(
    ("version", "head", "choice"),
    [
        ("0.16", set(), set()),
        ("0.22", set(), {"routed_experts"}),
        ("0.26", {"model", "created", "usage", "ec_transfer_params"}, set()),
        ("0.28", set(), {"sampling_mask"}),
        ("0.30", {"prompt_token_ids", "mm_placeholders"}, set()),
        ("0.31", {"prompt_token_id_logprobs", "metrics"}, set()),
        ("0.32", {"output_mode"}, {"stop_reason", "weight_versions"}),
    ],
)
def test_answers_grow_with_the_versions(version: str, head: set[str], choice: set[str]) -> None:
    """Each version has what it adds, and the one before it does not."""
    now, before = answers(version)[0], answers(f"0.{int(version.split('.')[1]) - 1}")[0]
    assert set(now) - set(before) == head
    assert set(now["choices"][0]) - set(before["choices"][0]) == choice


def test_the_oldest_answer_has_only_this() -> None:
    """Log-probabilities come in the form of chats."""
    tokens, completion = answers("0.16")
    assert set(tokens) == {"request_id", "choices", "prompt_logprobs", "kv_transfer_params"}
    assert set(tokens["choices"][0]) == {"index", "finish_reason", "token_ids", "logprobs"}
    told = tokens["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in told] == [f"token_id:{token}" for token in tokens["choices"][0]["token_ids"]]
    assert "routed_experts" not in completion["choices"][0]


def test_cached_tokens_are_told_in_two_forms() -> None:
    """Before 0.26 only where there are some."""
    told = {
        version: answers(version, enable_prompt_tokens_details=True)[1]["usage"]["prompt_tokens_details"]
        for version in ("0.25", "0.26")
    }
    assert told == {"0.25": None, "0.26": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None}}


def test_completions_have_experts_before_and_spans_after_the_other_endpoint() -> None:
    """From 0.21 and 0.33 on."""
    assert "routed_experts" in answers("0.21")[1]["choices"][0]
    assert "routed_experts" not in answers("0.21")[0]["choices"][0]
    assert "weight_versions" not in answers("0.32")[1]["choices"][0]
    assert "weight_versions" in answers("0.33")[1]["choices"][0]


def test_the_command_line_knows_the_dialect() -> None:
    """`--dialect` and `--vllm-version`."""
    command = [sys.executable, "-m", "rolloutsync.sim", "--watch-stdin", "--dialect", "vllm", "--vllm-version", "0.30"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=WAIT_S) as reply:
            assert json.load(reply) == {"version": "0.30.0"}
        process.kill()
