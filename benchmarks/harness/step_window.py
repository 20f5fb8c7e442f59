"""The measured process of ``step``: collect, drain, and again with what was left."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.plain import Control
from benchmarks.harness.process import answer_spec, cpu_s, memory_bytes
from rolloutsync import Collected, RolloutClient

_PROMPT = 32
_VOCABULARY = 20_000


def prompts() -> Iterator[list[int]]:
    """Endless."""
    for number in itertools.count():
        yield [(31 * number + 7 * place) % _VOCABULARY + 3 for place in range(_PROMPT)]


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Some steps; the first, which starts threads and connections, does not count."""
    source: Iterator[list[int]] = prompts()
    carried: list[Any] = []
    with RolloutClient(spec["urls"], progress=False) as client:
        got = step(client, spec, [], source)
        carried = got.partials
        busy, cpu, began = busy_s(spec["urls"]), cpu_s(), time.perf_counter()
        tokens = samples = resumed = 0
        for _ in range(spec["steps"]):
            resumed += sum(len(sample.output_ids) > 0 for group in carried for sample in group)
            got = step(client, spec, carried, source)
            carried = got.partials
            samples += len(got.samples)
            tokens += sum(len(sample.output_ids) for sample in got.samples)
        wall, cpu = time.perf_counter() - began, cpu_s() - cpu
        busy = [after - before for before, after in zip(busy, busy_s(spec["urls"]), strict=True)]
        assert client.audit().balanced
    return {
        "wall_s": wall,
        "busy_s": max(busy),
        "overhead_s": wall - max(busy),
        "overhead_percent": 100.0 * (wall / max(busy) - 1.0),
        "cpu_ms": 1e3 * cpu / samples,
        "resumed": resumed,
        "per_s": tokens / wall,
        "peak_mb": memory_bytes("VmHWM") / 1e6,
    }


def step(client: RolloutClient, spec: dict[str, Any], carried: list[Any], source: Iterator[list[int]]) -> Collected:
    """What a trainer does between two updates; ``carried`` goes on first."""
    got = client.collect(
        itertools.chain(carried, source),
        {"max_new_tokens": spec["tokens"]},
        n=spec["n"],
        target=spec["groups"],
        oversample=spec["oversample"],
    )
    client.abort_until_idle()
    if not got.complete:
        raise ValueError(f"the step has {got!r}")
    return got


def busy_s(urls: list[str]) -> list[float]:
    """Seconds that each engine had something to do, by its own word."""
    return [float(Control(url).call("GET", "/sim/state")["busy_seconds"]) for url in urls]


if __name__ == "__main__":
    answer_spec(measure)
