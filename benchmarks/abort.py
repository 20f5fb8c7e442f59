"""From the call of ``abort_until_idle`` to engines proven idle and all partials delivered.

    python benchmarks/abort.py --engines 8 --threads 2048

Beside it, a plain script that calls abort_all at each engine once and reads its load until that says zero.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import Benchmark, Column
from benchmarks.harness.cases import Tell
from benchmarks.harness.figures import Row, Verdict, at_most, cases_of, find
from benchmarks.harness.options import Common, Form
from benchmarks.harness.process import run_fresh
from benchmarks.peers import OURS
from rolloutsync.sim import SimFleet

NAME = "abort"
PLAIN = "plain script"
COLUMNS = (
    Column(name="idle_s", title="idle, s", spread=True),
    Column(name="delivered_s", title="delivered, s", spread=True),
    Column(name="slowest_s", title="slowest, s"),
    Column(name="cpu_ms", title="CPU, ms each", digits=3),
    Column(name="tokens", title="tokens each", digits=0),
    Column(name="peak_mb", title="peak, MB", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    engines: int = field(default=8, metadata={"help": "simulated engines, each a process"})
    threads: int = field(default=2048, metadata={"help": "requests in flight over all engines"})
    speed: float = field(default=50.0, metadata={"help": "tokens per second of one request"})
    hold_s: float = field(default=2.0, metadata={"help": "how long all of them run before the abort"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(engines=2, threads=16, hold_s=0.2)
    return Options(hold_s=1.0) if form is Form.QUICK else Options()


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    case = f"{options.threads} in flight on {options.engines} engines"
    rows = {who: Row(NAME, case, who) for who in ((OURS,) if common.compare is False else (OURS, PLAIN))}
    running = -(-options.threads // options.engines)
    with SimFleet(options.engines, max_running_requests=running, tokens_per_second=options.speed) as fleet:
        for turn in range(common.repeats):
            for who, row in rows.items():
                tell(f"{NAME}: {case}: {who}, run {turn + 1} of {common.repeats}")
                spec = {"who": who, "urls": fleet.urls, "threads": options.threads, "hold_s": options.hold_s}
                row.runs.append(run_fresh("benchmarks.harness.abort_window", json.dumps(spec)))
    return list(rows.values())


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Twice what the slowest engine takes for itself, and half a second."""
    verdicts = []
    for case in cases_of(rows):
        mine, bare = find(rows, case, OURS), find(rows, case, PLAIN)
        own = bare.median("slowest_s") if bare is not None else None
        if mine is not None and own is not None:
            words = f"{case}: within 2 x the slowest engine alone + 0.5 s"
            verdicts.append(at_most(NAME, words, mine.median("delivered_s"), 2.0 * own + 0.5, "s"))
    return verdicts


BENCHMARK = Benchmark(
    name=NAME, words="from the call to proven idle", columns=COLUMNS, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
