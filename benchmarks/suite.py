"""The benchmark suite: what it measures is a ratio to the clients that trainers use otherwise, in the same run.

    python -m benchmarks --quick                                        # all, in under five minutes
    python -m benchmarks stress routed_experts --json out.json          # some
    python -m benchmarks stress --engines 4 --threads 2048 --seconds 20 # one, with its own options
    python -m benchmarks stress --url http://10.0.0.5:30000 --threads 256 --seconds 60

Every client runs in a fresh process, so that CPU seconds and memory are its own. Nothing fails on timing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.facts import machine_facts
from benchmarks.harness.figures import Row, Verdict
from benchmarks.harness.options import Common, Form, add_common, add_fields, read_common, read_fields
from benchmarks.harness.process import BenchmarkError
from benchmarks.harness.tables import make_console, results_table, targets_table
from benchmarks.peers import PEERS

NAMES = ("stress", "routed_experts", "long_logprobs", "abort", "memory", "step", "collate", "scale")
APART = {"collate": "torch", "scale": "ray"}  # by name alone: they need an extra

_LIGHT = [name for name in NAMES if name not in APART]
_APART = " and ".join(f"{name} (needs {extra})" for name, extra in APART.items())
_NAMES_HELP = f"of {', '.join(NAMES)}; none: all but {_APART}"


def load(name: str) -> Benchmark:
    """One benchmark by its name."""
    found: Benchmark = import_module(f"benchmarks.{name}").BENCHMARK
    return found


def make_parser() -> argparse.ArgumentParser:
    """With what all benchmarks understand; one alone brings its own options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=_NAMES_HELP)
    add_common(parser)
    return parser


def read(arguments: Sequence[str]) -> tuple[Common, list[tuple[Benchmark, Any]]]:
    """Common options, and the benchmarks to run with theirs."""
    named = [word for word in arguments if word in NAMES]
    parser = make_parser()
    alone = load(named[0]) if len(named) == 1 else None
    if alone is not None:
        add_fields(parser, alone.defaults(read_common(parser.parse_known_args(arguments)[0]).form))
    parsed = parser.parse_args(arguments)
    unknown = [*(set(parsed.names) - set(NAMES)), *(set(parsed.peers) - set(PEERS))]
    if unknown:
        parser.error(f"{', '.join(unknown)}: benchmarks are {', '.join(NAMES)}; clients are {', '.join(PEERS)}")
    common = read_common(parsed)
    chosen = [alone] if alone is not None else [load(name) for name in parsed.names or _LIGHT]
    plans = [(one, one.defaults(common.form)) for one in chosen]
    if alone is not None:
        plans = [(alone, read_fields(parsed, alone.defaults(common.form)))]
    return common, plans


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write. 1 if a client or a server did not work; a target that is not met is no failure."""
    common, plans = read(sys.argv[1:] if arguments is None else arguments)
    console = make_console()
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    failed = 0
    for benchmark, options in plans:
        try:
            measured = _run(benchmark, options, common, console)
        except BenchmarkError as error:
            print(error, file=sys.stderr)
            failed = 1
            continue
        rows += measured
        verdicts += [] if common.form is Form.SMOKE else benchmark.judge(measured)
    if verdicts:
        console.print(targets_table(verdicts))
    _write(common, rows, verdicts)
    return failed


def _run(benchmark: Benchmark, options: Any, common: Common, console: Console) -> list[Row]:
    began = time.monotonic()
    with console.status(benchmark.name) as status:

        def tell(words: str) -> None:
            status.update(words)
            if not console.is_terminal:
                print(f"{time.monotonic() - began:5.1f} s  {words}", file=sys.stderr, flush=True)

        rows = benchmark.run(options, common, tell)
    console.print(results_table(benchmark, rows))
    return rows


def _write(common: Common, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    facts = machine_facts()
    if common.json:
        found = {
            "form": common.form.value,
            "facts": facts,
            "rows": [asdict(row) for row in rows],
            "targets": [asdict(verdict) | {"met": verdict.met} for verdict in verdicts],
        }
        Path(common.json).write_text(json.dumps(found, indent=1) + "\n")
    if common.plot:
        from benchmarks.harness.plots import draw  # noqa: PLC0415 - matplotlib is slow to import

        draw(rows, facts, Path(common.plot))
