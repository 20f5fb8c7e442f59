"""Whole steps as a trainer makes them: oversample, cut the rest, drain, go on with the partials in the next.

    python benchmarks/step.py --engines 4 --groups 32 --n 8

The overhead is the wall time beyond the time that the busiest engine had something to do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import Benchmark, Column
from benchmarks.harness.cases import Tell
from benchmarks.harness.figures import Row, Verdict
from benchmarks.harness.options import Common, Form
from benchmarks.harness.process import run_fresh
from benchmarks.peers import OURS
from rolloutsync.sim import SimFleet

NAME = "step"
COLUMNS = (
    Column(name="wall_s", title="wall, s", spread=True),
    Column(name="busy_s", title="busy, s"),
    Column(name="overhead_s", title="over, s", spread=True),
    Column(name="overhead_percent", title="over, %", digits=1),
    Column(name="cpu_ms", title="CPU, ms each", digits=3),
    Column(name="resumed", title="resumed", digits=0),
    Column(name="per_s", title="tokens/s", digits=0),
    Column(name="peak_mb", title="peak, MB", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    engines: int = field(default=4, metadata={"help": "simulated engines, each a process"})
    running: int = field(default=64, metadata={"help": "requests that an engine runs at once"})
    speed: float = field(default=100.0, metadata={"help": "tokens per second of one request"})
    mean_tokens: float = field(default=256.0, metadata={"help": "mean length of a sample"})
    tokens: int = field(default=1024, metadata={"help": "at most"})
    groups: int = field(default=32, metadata={"help": "that a step wants"})
    n: int = field(default=8, metadata={"help": "samples of a group"})
    oversample: float = field(default=1.5, metadata={"help": "groups in flight for each that is missing"})
    steps: int = field(default=3, metadata={"help": "measured, after one that warms up"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(engines=2, running=8, speed=500.0, mean_tokens=32.0, tokens=64, groups=2, n=2, steps=1)
    return Options(steps=1, groups=16, mean_tokens=128.0, tokens=512, speed=200.0) if form is Form.QUICK else Options()


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    case = f"{options.steps} x {options.groups} groups of {options.n}, {options.engines} engines"
    row = Row(NAME, case, OURS)
    config: dict[str, Any] = {
        "max_running_requests": options.running,
        "tokens_per_second": options.speed,
        "mean_output_tokens": options.mean_tokens,
        "random_when_unseeded": True,
    }
    for turn in range(common.repeats):
        tell(f"{NAME}: {case}: run {turn + 1} of {common.repeats}")
        with SimFleet(options.engines, **config) as fleet:
            spec = asdict(options) | {"urls": fleet.urls}
            row.runs.append(run_fresh("benchmarks.harness.step_window", json.dumps(spec)))
    return [row]


def judge(rows: Sequence[Row]) -> list[Verdict]:  # noqa: ARG001 - the suite's signature
    """The issue sets no target."""
    return []


BENCHMARK = Benchmark(
    name=NAME, words="oversample, abort, resume", columns=COLUMNS, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
