"""One actor, two, four: samples per second, and what each costs the actors and the driver.

    python benchmarks/scale.py --actors 1 2 4 --in-flight 64

Each actor has two engines of its own on the load server. In the case "paced" an engine takes a second for an answer,
so that engines set the pace, as in a rollout: throughput should grow as the actors do. In "flat out" answers come at
once and are large: the cores set the pace, and all of actors, driver and load server share this machine's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import Benchmark, Column
from benchmarks.harness.cases import Tell
from benchmarks.harness.figures import Row, Verdict
from benchmarks.harness.options import Common, Form
from benchmarks.harness.process import run_fresh
from benchmarks.harness.server_process import LoadServer
from benchmarks.harness.work import Shape, Work
from benchmarks.peers import OURS

NAME = "scale"
COLUMNS = (
    Column(name="wall_s", title="wall, s", spread=True),
    Column(name="per_s", title="samples/s", digits=1, spread=True),
    Column(name="growth", title="by one actor's", digits=2),
    Column(name="actor_ms", title="actor CPU, ms each", digits=2),
    Column(name="driver_ms", title="driver CPU, ms each", digits=2),
    Column(name="actor_cores", title="cores per actor", digits=2),
    Column(name="actor_mb", title="actor peak, MB", digits=0),
    Column(name="driver_mb", title="driver peak, MB", digits=0),
)
_ENGINES = 2  # of each actor
_STORE_BYTES = 4 * 10**9


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    actors: tuple[int, ...] = field(default=(1, 2, 4), metadata={"help": "how many, in turn"})
    in_flight: int = field(default=256, metadata={"help": "at each engine, paced"})
    seconds: int = field(default=8, metadata={"help": "of engine time, paced"})
    large: int = field(default=8, metadata={"help": "in flight at each engine, flat out"})
    answers: int = field(default=192, metadata={"help": "of each actor, flat out"})
    tokens: int = field(default=6144, metadata={"help": "of a large answer; x 48 layers x top 8 x 4 bytes x 4/3"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(actors=(1, 2), in_flight=4, seconds=1, large=1, answers=4, tokens=128)
    return Options(actors=(1, 2), seconds=4, answers=64) if form is Form.QUICK else Options()


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    small, large = Shape(), Shape(prompt_tokens=128, tokens=options.tokens, layers=48, topk=8)
    rows = []
    for count in options.actors:
        engines = _ENGINES * count
        paced = engines * options.in_flight
        rows.append(_run(count, "paced", small, 1.0, paced, paced * options.seconds, 1, common, tell))
        flat = options.answers * count
        rows.append(_run(count, "flat out", large, 0.0, engines * options.large, flat, 4, common, tell))
    for row in rows:
        alone = next(other for other in rows if other.case.split(",")[1] == row.case.split(",")[1])
        least = alone.median("per_s") or 0.0
        for measured in row.runs:
            measured["growth"] = measured["per_s"] / least
    return sorted(rows, key=lambda row: row.case.split(",")[1], reverse=True)


def _run(
    actors: int,
    words: str,
    shape: Shape,
    engine_s: float,
    threads: int,
    requests: int,
    batches: int,
    common: Common,
    tell: Tell,
) -> Row:
    row = Row(NAME, f"{actors} actors, {words}", OURS)
    with LoadServer(_ENGINES * actors, engine_s, shape) as urls:
        work = Work(peer=OURS, urls=list(urls), threads=threads, requests=requests, shape=shape)
        spec = {"work": asdict(work), "actors": actors, "batches": batches, "store_bytes": _STORE_BYTES}
        for turn in range(common.repeats):
            tell(f"{NAME}: {row.case}: run {turn + 1} of {common.repeats}")
            row.runs.append(run_fresh("benchmarks.harness.scale_window", json.dumps(spec)))
    return row


def judge(rows: Sequence[Row]) -> list[Verdict]:  # noqa: ARG001 - the suite's signature
    """No target: how far it goes depends on the machine's cores."""
    return []


BENCHMARK = Benchmark(name=NAME, words="actors side by side", columns=COLUMNS, defaults=defaults, run=run, judge=judge)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
