"""What samples keep beyond their arrays, the peak of a whole step, and what threads in flight take.

python benchmarks/memory.py --samples 2048 --megabytes 4 --threads 4096
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
from benchmarks.harness.cases import Case, Tell, engines_of
from benchmarks.harness.figures import Row, Verdict, at_most
from benchmarks.harness.options import Common, Form, chosen_peers
from benchmarks.harness.process import run_fresh
from benchmarks.harness.work import Shape
from benchmarks.peers import AIOHTTP, HTTPX, OURS, RAW

NAME = "memory"
KEEP, STEP, THREADS = "keep", "step", "threads"
_LAYERS, _TOPK = 48, 8
_HELD_S = 600.0  # longer than any start of all threads; they are released when the last is there
COLUMNS = (
    Column(name="arrays_mb", title="arrays, MB", digits=1),
    Column(name="live_mb", title="live, MB", digits=1),
    Column(name="live_percent", title="above, %"),
    Column(name="each_bytes", title="B each more", digits=0),
    Column(name="left_mb", title="left, MB", digits=1),
    Column(name="resident_mb", title="RSS, MB", digits=0),
    Column(name="resident_percent", title="above, %", digits=1),
    Column(name="flying_mb", title="flying, MB", digits=0, spread=True),
    Column(name="peak_mb", title="peak, MB", digits=0),
    Column(name="over_mb", title="over, MB", digits=0),
)
NAMES = {  # of the number that has a target, by how its case begins
    "keep ": ("live_percent", "live above the arrays", 10.0, "%"),
    "step ": ("resident_percent", "resident above the arrays", 10.0, "%"),
    "4096 ": ("flying_mb", "above the idle process", 150.0, "MB"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    samples: int = field(default=2048, metadata={"help": "of the step, all in flight at once"})
    megabytes: float = field(default=4.0, metadata={"help": "of int32 routed experts in each answer"})
    compared: int = field(default=128, metadata={"help": "samples that every client keeps"})
    threads: int = field(default=4096, metadata={"help": "small requests in flight"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(samples=8, megabytes=0.5, compared=4, threads=32)
    return Options(samples=512, compared=64) if form is Form.QUICK else Options()


def shape_of(megabytes: float) -> Shape:
    """Answers whose experts are about so large as int32."""
    rows = round(megabytes * 1e6 / (4 * _LAYERS * _TOPK))
    return Shape(tokens=max(1, rows - Shape().prompt_tokens + 1), layers=_LAYERS, topk=_TOPK)


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    return [row for kind, case in make_cases(options, common) for row in _run_case(kind, case, tell)]


def make_cases(options: Options, common: Common) -> list[tuple[str, Case]]:
    """What samples keep by all clients; the step and its peak by ours alone; threads in flight."""
    full, large = common.form is Form.FULL, shape_of(options.megabytes)
    keep = chosen_peers(common, (OURS, AIOHTTP, HTTPX, RAW) if full else (OURS, AIOHTTP), OURS)
    flying = chosen_peers(common, (OURS, AIOHTTP, RAW) if full else (OURS,), OURS)  # httpx would need minutes
    repeats = common.repeats if full else 1
    return [
        (KEEP, _case(f"keep {options.compared} samples", large, options.compared, keep, repeats)),
        (STEP, _case(f"step of {options.samples} samples", large, options.samples, (OURS,), repeats)),
        (THREADS, _case(f"{options.threads} in flight", Shape(), options.threads, flying, repeats, _HELD_S)),
    ]


def _case(label: str, shape: Shape, requests: int, peers: Sequence[str], repeats: int, engine_s: float = 0.0) -> Case:
    return Case(
        label=label,
        shape=shape,
        threads=requests,
        requests=requests,
        peers=peers,
        repeats=repeats,
        engines=4,
        engine_s=engine_s,
    )


def _run_case(kind: str, case: Case, tell: Tell) -> list[Row]:
    rows = {peer: Row(NAME, case.label, peer) for peer in case.peers}
    with engines_of(case) as urls:
        for turn in range(case.repeats):
            for peer, row in rows.items():
                tell(f"{NAME}: {case.label}: {peer}, run {turn + 1} of {case.repeats}")
                spec = {"kind": kind, "work": asdict(case.work(peer, urls))}
                variables: dict[str, Any] = (
                    {"PYTHONMALLOC": "malloc"} if kind == KEEP else {}
                )  # so that its books are complete
                row.runs.append(run_fresh("benchmarks.harness.memory_window", json.dumps(spec), **variables))
    return list(rows.values())


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """A tenth above the arrays; 150 MB for 4096 threads."""
    mine = [row for row in rows if row.who == OURS]
    found = [(row, NAMES[kind]) for row in mine for kind in NAMES if row.case.startswith(kind)]
    return [
        at_most(NAME, f"{row.case}: {words}", row.median(name), most, unit) for row, (name, words, most, unit) in found
    ]


BENCHMARK = Benchmark(
    name=NAME, words="what samples and threads take", columns=COLUMNS, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
