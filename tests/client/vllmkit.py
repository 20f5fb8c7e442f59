"""What the tests of vLLM engines share: one simulated engine for each version that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rolloutsync import RolloutClient
from rolloutsync.sim import SimFleet
from rolloutsync.sim.fleet import SimEngine
from tests.client.kit import ENDLESS, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]
SETTLES_S = 0.2  # how long zeros must last in tests where they prove little
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
VERSIONS = ("0.22.0", "0.33.0")  # no labels and no abort_requests; as it is now
MORE_VERSIONS = ("0.16.0", "0.25.0", "0.28.0", "0.32.0")


def called(engine: SimEngine) -> dict[str, int]:
    """How often each path was."""
    told: dict[str, int] = engine.state()["requests"]
    return told


def tidy(engine: SimEngine) -> None:
    """As new: no fault, no pause, nothing running."""
    engine.clear_faults()
    engine.call("POST", "/resume")
    if engine.config.release >= (0, 26, 0):
        engine.call("POST", "/abort_requests", {})
    elif engine.state()["live"]:
        engine.call("POST", "/pause")
        engine.call("POST", "/resume")


@contextmanager
def alone(version: str = "0.33", **settings: Any) -> Iterator[SimEngine]:
    """One engine with settings of its own."""
    with SimFleet(engines=1, dialect="vllm", version=version, tokens_per_second=1000.0, **settings) as fleet:
        yield fleet.engines[0]


def await_tokens(engine: SimEngine, count: int) -> None:
    """Until so many requests have begun to bring tokens."""
    eventually(lambda: sum(row["tokens"] > 0 for row in engine.state()["generations"]) >= count, f"{count} run")


def endless(client: RolloutClient, engine: SimEngine, count: int = 4) -> Any:
    """A job of samples that do not end by themselves; all of them run."""
    job = client.start(prompts(count), ENDLESS)
    await_tokens(engine, count)
    return job
