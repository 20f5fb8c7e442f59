"""Many small answers in flight: CPU per request, throughput and memory of the client.

    python benchmarks/stress.py --engines 4 --threads 2048 --seconds 20
    python benchmarks/stress.py --url http://10.0.0.5:30000 --url http://10.0.0.6:30000 --threads 256 --seconds 60

The engines are a load server that answers after ``--engine-s`` seconds, or your own (``--url``; then only ours runs,
unless ``--compare yes``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import WINDOW, Benchmark
from benchmarks.harness.cases import Case, Limits, Tell, run_cases
from benchmarks.harness.figures import Row, Verdict, at_least, at_most, cases_of, find, ratio
from benchmarks.harness.options import Common, Form, chosen_peers
from benchmarks.harness.work import Shape
from benchmarks.peers import AIOHTTP, HTTPX, OURS, RAW, REQUESTS

NAME = "stress"
_DEFAULT = (OURS, AIOHTTP, RAW, HTTPX, REQUESTS)
_MANY = 1024  # in flight; from here on httpx needs minutes
_THREADS = (64, 512, 2048, 4096)
_WAVES = 2  # that a run measures at least, in the full form


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    engines: int = field(default=4, metadata={"help": "ports of the load server"})
    threads: tuple[int, ...] = field(default=_THREADS, metadata={"help": "requests in flight"})
    engine_s: tuple[float, ...] = field(default=(0.0, 1.0), metadata={"help": "seconds until an engine answers"})
    seconds: float = field(default=0.0, metadata={"help": "about how long each run measures; 0: by --requests"})
    requests: int = field(default=8192, metadata={"help": "measured in each run, at least one for each in flight"})
    prompt_tokens: int = field(default=128, metadata={"help": "ids in each request"})
    tokens: int = field(default=40, metadata={"help": "in each answer, with logprobs"})
    api_key: str = field(default="", metadata={"help": "of real engines"})
    url: tuple[str, ...] = field(default=(), metadata={"help": "real engines", "type": str})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(engines=2, threads=(16,), engine_s=(0.0,), requests=64)
    return Options(requests=2048) if form is Form.QUICK else Options()


def label(threads: int, engine_s: float) -> str:
    """Of one case."""
    return f"{threads} in flight, {engine_s:g} s"


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    return run_cases(NAME, make_cases(options, common), tell)


def make_cases(options: Options, common: Common) -> list[Case]:
    """One for each number of threads and each engine time; quick leaves most of the default ones out."""
    pairs = [(threads, engine_s) for threads in options.threads for engine_s in options.engine_s]
    if options.url:
        pairs = [(threads, 0.0) for threads in options.threads]
    elif common.form is Form.QUICK and options == defaults(Form.QUICK):
        few = _case(replace(options, requests=8192), common, 64, 0.0)
        return [few, *(_case(options, common, threads, 1.0) for threads in (2048, 4096))]
    return [_case(options, common, threads, engine_s) for threads, engine_s in pairs]


def _case(options: Options, common: Common, threads: int, engine_s: float) -> Case:
    return Case(
        label=f"{threads} in flight" if options.url else label(threads, engine_s),
        shape=Shape(prompt_tokens=options.prompt_tokens, tokens=options.tokens),
        threads=threads,
        requests=max(options.requests, _WAVES * threads) if common.form is Form.FULL else options.requests,
        seconds=options.seconds,
        engines=options.engines,
        engine_s=engine_s,
        urls=options.url,
        api_key=options.api_key,
        peers=_peers(options, common, threads),
        repeats=common.repeats,
        spared=_spared(common, threads),
    )


def _peers(options: Options, common: Common, threads: int) -> tuple[str, ...]:
    """Above 2048 in flight httpx has no target and takes very long; quick has no time for what has no target."""
    peers = chosen_peers(common, _DEFAULT, OURS, compare=not options.url)
    left_out: set[str] = set()
    if threads > 2 * _MANY:
        left_out |= {HTTPX, RAW} if common.form is Form.QUICK else {HTTPX}
    if threads >= _MANY and common.form is Form.QUICK:
        left_out.add(REQUESTS)
    return peers if common.peers else tuple(peer for peer in peers if peer not in left_out)


def _spared(common: Common, threads: int) -> dict[str, Limits]:
    """What is many times slower needs fewer requests for a figure as good; a wave is the least."""
    if common.form is Form.FULL:
        return {HTTPX: Limits(requests=threads)} if threads >= _MANY else {}
    slow = Limits(requests=max(threads, 512), warmup=64, repeats=1)
    return {HTTPX: slow, REQUESTS: slow, **({RAW: Limits(repeats=1)} if threads >= _MANY else {})}


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """CPU of each request: no more than aiohttp with orjson, ten times less than httpx at 2048."""
    measured = [case for case in cases_of(rows) if find(rows, case, AIOHTTP)]
    many = [case for case in measured if case.startswith("2048 ")]
    near = [(f"{case}: CPU each, ours by aiohttp", ratio(rows, case, "cpu_ms", OURS, AIOHTTP)) for case in measured]
    far = [(f"{case}: CPU each, httpx by ours", ratio(rows, case, "cpu_ms", HTTPX, OURS)) for case in many]
    return [at_most(NAME, words, value, 1.0) for words, value in near] + [
        at_least(NAME, words, value, 10.0) for words, value in far
    ]


BENCHMARK = Benchmark(
    name=NAME, words="small answers, many in flight", columns=WINDOW, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
