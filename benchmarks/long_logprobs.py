"""Long answers with logprobs and no experts.

python benchmarks/long_logprobs.py --tokens 8192 --threads 64
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import WINDOW, Benchmark
from benchmarks.harness.cases import Case, Limits, Tell, run_cases
from benchmarks.harness.figures import Row, Verdict, at_most, cases_of, ratio
from benchmarks.harness.options import Common, Form, chosen_peers
from benchmarks.harness.work import Shape
from benchmarks.peers import AIOHTTP, HTTPX, OURS, RAW, REQUESTS

NAME = "long_logprobs"
_DEFAULT = (OURS, AIOHTTP, RAW, HTTPX, REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    tokens: int = field(default=8192, metadata={"help": "in each answer, with logprobs"})
    threads: int = field(default=64, metadata={"help": "requests in flight"})
    requests: int = field(default=512, metadata={"help": "measured in each run"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(tokens=256, threads=4, requests=8)
    return Options(requests=128) if form is Form.QUICK else Options()


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    slow = {peer: Limits(repeats=1) for peer in (RAW, HTTPX, REQUESTS)}
    case = Case(
        label=f"{options.tokens} tokens, {options.threads} in flight",
        shape=Shape(tokens=options.tokens),
        threads=options.threads,
        requests=options.requests,
        peers=chosen_peers(common, _DEFAULT, OURS),
        repeats=common.repeats,
        spared={} if common.form is Form.FULL else slow,
    )
    return run_cases(NAME, [case], tell)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """CPU of each answer: no more than aiohttp with orjson."""
    return [
        at_most(NAME, f"{case}: CPU each, ours by aiohttp", ratio(rows, case, "cpu_ms", OURS, AIOHTTP), 1.0)
        for case in cases_of(rows)
    ]


BENCHMARK = Benchmark(
    name=NAME, words="long answers with logprobs", columns=WINDOW, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
