"""Engines shared by the whole session, each with other settings; every test finds them idle, unpaused and faultless."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rolloutsync.sim import SimConfig, SimEngine, SimFleet

from .kit import Caller, until
from .vllm_kit import VllmCaller

REAL: dict[str, Any] = {"vocab_size": 512, "context_length": 2048, "max_running_requests": 4, "max_total_tokens": 8192}
QUICK: dict[str, Any] = {
    "health_poll_s": 0.02,
    "health_timeout_s": 0.2,
    "pause_poll_s": 0.05,
    "tokens_per_second": 400.0,
}
CONFIGS = {
    "main": SimConfig(**REAL, **QUICK, routed_experts=(2, 2, 8), disconnect_poll_s=0.3),
    "old": SimConfig(**REAL, **QUICK, version="0.5.9"),
    "mid": SimConfig(**REAL, **QUICK, version="0.5.15"),
    "ranks": SimConfig(**REAL, **QUICK, dp_size=2),
    "keys": SimConfig(**QUICK, api_key="user", admin_api_key="boss"),
    "queue": SimConfig(**{**REAL, "max_running_requests": 1}, **QUICK, max_queued_requests=1, hidden_size=3),
}
VLLM_CONFIGS = {
    "vllm": SimConfig(
        **{**REAL, **QUICK, "max_running_requests": 64},
        dialect="vllm",
        routed_experts=(2, 2, 300),
        enable_prompt_tokens_details=True,
        enable_server_load_tracking=True,
        enable_request_id_headers=True,
    ),
    "recorded": SimConfig(
        **REAL, **QUICK, dialect="vllm", version="0.32", model_path="tiny", enable_server_load_tracking=True
    ),
    "ranked": SimConfig(**REAL, **QUICK, dialect="vllm", dp_size=2, dev_mode=False, api_key="user"),
}


@pytest.fixture(scope="session")
def fleet() -> Iterator[dict[str, SimEngine]]:
    """All shared engines by name."""
    with SimFleet(configs=list(CONFIGS.values())) as started:
        yield dict(zip(CONFIGS, started.engines, strict=True))


@pytest.fixture(scope="session")
def vllm_fleet() -> Iterator[dict[str, SimEngine]]:
    """All shared engines that speak vLLM, by name."""
    with SimFleet(configs=list(VLLM_CONFIGS.values())) as started:
        yield dict(zip(VLLM_CONFIGS, started.engines, strict=True))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that block."""
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="call") as threads:
        yield threads


def _lend(engine: SimEngine, pool: ThreadPoolExecutor) -> Iterator[Caller]:
    engine.reset()
    yield Caller(engine, pool)
    engine.clear_faults()
    engine.call("POST", "/continue_generation", {})
    engine.slow_down(None)
    until(lambda: _cleared(engine), lambda left: left == 0, "an idle engine")


def _cleared(engine: SimEngine) -> int:
    engine.call("POST", "/abort_request", {"abort_all": True})
    return int(engine.state()["live"])


@pytest.fixture
def main(fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[Caller]:
    """The newest version, with experts."""
    yield from _lend(fleet["main"], pool)


@pytest.fixture
def old(fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[Caller]:
    """0.5.9: live loads, no strict check."""
    yield from _lend(fleet["old"], pool)


@pytest.fixture
def mid(fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[Caller]:
    """0.5.15: snapshots, and /get_load as well."""
    yield from _lend(fleet["mid"], pool)


@pytest.fixture
def ranks(fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[Caller]:
    """Two data-parallel ranks."""
    yield from _lend(fleet["ranks"], pool)


@pytest.fixture
def keys(fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[Caller]:
    """An engine that wants keys."""
    yield from _lend(fleet["keys"], pool)


@pytest.fixture
def queue(fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[Caller]:
    """One request runs, one may wait; hidden states are on."""
    yield from _lend(fleet["queue"], pool)


def _lend_vllm(engine: SimEngine, pool: ThreadPoolExecutor) -> Iterator[VllmCaller]:
    engine.reset()
    yield VllmCaller(engine, pool)
    engine.clear_faults()
    engine.slow_down(None)
    if engine.config.dev_mode:
        engine.call("POST", "/wake_up")
        engine.call("POST", "/abort_requests", {})
        engine.call("POST", "/resume")
    until(lambda: engine.state()["live"], lambda left: left == 0, "an idle engine")


@pytest.fixture
def vllm(vllm_fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[VllmCaller]:
    """The newest version, with experts, and all that is counted or told only on demand."""
    yield from _lend_vllm(vllm_fleet["vllm"], pool)


@pytest.fixture
def recorded(vllm_fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[VllmCaller]:
    """0.32, started as the one that was recorded: four run, the others wait; a pause queues what comes."""
    yield from _lend_vllm(vllm_fleet["recorded"], pool)


@pytest.fixture
def ranked(vllm_fleet: dict[str, SimEngine], pool: ThreadPoolExecutor) -> Iterator[VllmCaller]:
    """Two data-parallel ranks, a key, and no developer mode."""
    yield from _lend_vllm(vllm_fleet["ranked"], pool)
