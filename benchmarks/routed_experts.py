"""Large answers with routed experts, from the socket to [rows, layers, topk] arrays.

python benchmarks/routed_experts.py --tokens 8192 --layers 48 --topk 8 --threads 16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import WINDOW, Benchmark
from benchmarks.harness.cases import Case, Limits, Tell, run_cases
from benchmarks.harness.figures import Row, Verdict, at_least, at_most, cases_of, ratio
from benchmarks.harness.options import Common, Form, chosen_peers
from benchmarks.harness.work import Shape
from benchmarks.peers import AIOHTTP, HTTPX, OURS, RAW, REQUESTS

NAME = "routed_experts"
MAIN_TOKENS = 8192
_DEFAULT = (OURS, AIOHTTP, HTTPX, RAW, REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    tokens: tuple[int, ...] = field(default=(512, MAIN_TOKENS, 32768), metadata={"help": "in each answer"})
    layers: int = field(default=48, metadata={"help": "that report their experts"})
    topk: int = field(default=8, metadata={"help": "experts of each token in each layer"})
    threads: int = field(default=16, metadata={"help": "answers in flight"})
    megabytes: int = field(default=1200, metadata={"help": "of answers that each run measures"})
    prompt_tokens: int = field(default=128, metadata={"help": "ids in each request"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(tokens=(64,), layers=4, threads=4, megabytes=1)
    return Options(megabytes=600) if form is Form.QUICK else Options()


def label(tokens: int) -> str:
    """Of one case."""
    return f"{tokens} tokens"


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    return run_cases(NAME, [_case(options, common, tokens) for tokens in options.tokens], tell)


def _case(options: Options, common: Common, tokens: int) -> Case:
    shape = Shape(prompt_tokens=options.prompt_tokens, tokens=tokens, layers=options.layers, topk=options.topk)
    size = shape.rows * shape.layers * shape.topk * 4 * 4 // 3
    quick = common.form is Form.QUICK and not common.peers
    aside = quick and tokens != MAIN_TOKENS and len(options.tokens) > 1
    peers = chosen_peers(common, _DEFAULT, OURS)
    return Case(
        label=label(tokens),
        shape=shape,
        threads=options.threads,
        requests=min(512, max(options.threads, options.megabytes * 1_000_000 // size)),
        peers=tuple(peer for peer in peers if peer not in {HTTPX, REQUESTS}) if aside else peers,
        repeats=1 if aside else common.repeats,
        spared={} if common.form is Form.FULL else {REQUESTS: Limits(repeats=1, requests=options.threads)},
    )


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """At 8192 tokens: near the floor, and several times less than the async clients."""
    case = label(MAIN_TOKENS)
    if case not in cases_of(rows):
        return []
    verdicts = [at_most(NAME, "CPU each, ours by the floor", ratio(rows, case, "cpu_ms", OURS, RAW), 1.3)]
    for peer in (HTTPX, AIOHTTP):
        verdicts += [
            at_least(NAME, f"CPU each, {peer} by ours", ratio(rows, case, "cpu_ms", peer, OURS), 3.0),
            at_least(NAME, f"throughput, ours by {peer}", ratio(rows, case, "per_s", OURS, peer), 2.0),
        ]
    return verdicts


BENCHMARK = Benchmark(
    name=NAME, words="large answers into arrays", columns=WINDOW, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
