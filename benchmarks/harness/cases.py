"""Clients side by side: each case has its own load server, each run its own process, the repeats take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.figures import Row
from benchmarks.harness.process import run_fresh
from benchmarks.harness.server_process import LoadServer
from benchmarks.harness.work import Shape, Work

MB = 1e6
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client that is slow may be spared. None: as all others.

    Attributes:
        requests: Measured.
        warmup: Requests before.
        repeats: Runs.
    """

    requests: int | None = None
    warmup: int | None = None
    repeats: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load.

    Attributes:
        label: For tables.
        shape: Of requests and answers.
        threads: Requests in flight over all engines.
        requests: Measured in each run.
        seconds: Instead of ``requests``, about this long.
        engines: Of the load server.
        engine_s: Seconds from a request to its answer there.
        urls: Real engines in place of the load server.
        api_key: Of real engines.
        peers: That run.
        repeats: Of each.
        spared: By client.
    """

    label: str
    shape: Shape
    threads: int
    requests: int
    peers: Sequence[str]
    repeats: int
    seconds: float = 0.0
    engines: int = 1
    engine_s: float = 0.0
    urls: Sequence[str] = ()
    api_key: str = ""
    spared: Mapping[str, Limits] = field(default_factory=dict)

    def limits(self, peer: str) -> Limits:
        """Of one client."""
        return self.spared.get(peer, Limits())

    def work(self, peer: str, urls: list[str]) -> Work:
        """What the process of a client is to do."""
        limits = self.limits(peer)
        return Work(
            peer=peer,
            urls=urls,
            api_key=self.api_key,
            threads=self.threads,
            requests=max(self.threads, limits.requests or self.requests),
            seconds=self.seconds,
            warmup=limits.warmup,
            shape=self.shape,
            checked=not self.urls,
        )


def run_cases(benchmark: str, cases: Sequence[Case], tell: Tell) -> list[Row]:
    """All runs of all cases."""
    return [row for case in cases for row in _run_case(benchmark, case, tell)]


def _run_case(benchmark: str, case: Case, tell: Tell) -> list[Row]:
    rows = {peer: Row(benchmark, case.label, peer) for peer in case.peers}
    with engines_of(case) as urls:
        for turn in range(case.repeats):
            for peer, row in rows.items():
                if turn < (case.limits(peer).repeats or case.repeats):
                    tell(f"{benchmark}: {case.label}: {peer}, run {turn + 1} of {case.repeats}")
                    row.runs.append(numbers(run_fresh("benchmarks.harness.window", case.work(peer, urls).to_json())))
    return list(rows.values())


def engines_of(case: Case) -> contextlib.AbstractContextManager[list[str]]:
    """URLs for the length of a ``with`` block."""
    if case.urls:
        return contextlib.nullcontext(list(case.urls))
    return LoadServer(case.engines, case.engine_s, case.shape)


def numbers(measured: Mapping[str, Any]) -> dict[str, float]:
    """A ``Measurement`` as people read it."""
    requests, wall = measured["requests"], measured["wall_s"]
    return {
        "requests": requests,
        "retries": measured["retries"],
        "wall_s": wall,
        "cpu_ms": 1e3 * measured["cpu_s"] / requests,
        "per_s": requests / wall,
        "peak_mb": measured["peak_bytes"] / MB,
        "grown_mb": (measured["peak_bytes"] - measured["idle_bytes"]) / MB,
    }
