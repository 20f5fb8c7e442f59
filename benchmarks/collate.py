"""A batch of tensors, padded and packed, against the loops that trainers write: time and peak memory.

``lists`` makes a tensor of each field of each sample out of Python lists and pads them with ``pad_sequence``;
``arrays`` does it with numpy and ``torch.from_numpy``. Needs torch.

python -m benchmarks.collate --samples 512 --tokens 8192
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.benchmark import Benchmark, Column
from benchmarks.harness.cases import Tell
from benchmarks.harness.figures import Row, Verdict, at_least, at_most, cases_of, find, ratio
from benchmarks.harness.options import Common, Form
from benchmarks.harness.process import run_fresh
from benchmarks.peers import OURS

NAME = "collate"
LISTS, ARRAYS = "lists", "arrays"
FORMS = ("collate", "pack")
COLUMNS = (
    Column(name="wall_ms", title="wall, ms", digits=0, spread=True, ratio=True),
    Column(name="cpu_ms", title="CPU, ms", digits=0),
    Column(name="batch_mb", title="batch, MB", digits=0),
    Column(name="peak_mb", title="peak, MB", digits=0, ratio=True),
    Column(name="over_percent", title="above, %", digits=1),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names."""

    samples: int = field(default=512, metadata={"help": "in the batch"})
    tokens: int = field(default=8192, metadata={"help": "of each sample, an eighth of them its prompt"})
    routed: int = field(default=128, metadata={"help": "samples in the batch that has routed experts"})
    layers: int = field(default=48, metadata={"help": "that report their experts there"})
    topk: int = field(default=8, metadata={"help": "experts of each token in each layer"})


def defaults(form: Form) -> Options:
    """See ``Benchmark``."""
    if form is Form.SMOKE:
        return Options(samples=8, tokens=256, routed=4, layers=4)
    return Options(routed=32) if form is Form.QUICK else Options()


def specs_of(options: Options) -> dict[str, dict[str, Any]]:
    """By the label of its case."""
    plain = {"samples": options.samples, "tokens": options.tokens, "layers": 0, "topk": 0}
    routed = {**plain, "samples": options.routed, "layers": options.layers, "topk": options.topk}
    with_experts = f"{options.routed} x {options.tokens}, experts"
    return {
        **{f"{form} {options.samples} x {options.tokens}": {"form": form, **plain} for form in FORMS},
        **{f"{form} {with_experts}": {"form": form, **routed} for form in FORMS},
    }


def run(options: Options, common: Common, tell: Tell) -> list[Row]:
    """See ``Benchmark``."""
    who = (OURS,) if common.compare is False else (OURS, ARRAYS, LISTS)
    rows: list[Row] = []
    for case, spec in specs_of(options).items():
        found = {peer: Row(NAME, case, peer) for peer in who}
        for turn in range(common.repeats):
            for peer, row in found.items():
                tell(f"{NAME}: {case}: {peer}, run {turn + 1} of {common.repeats}")
                row.runs.append(run_fresh("benchmarks.harness.collate_window", json.dumps({**spec, "who": peer})))
        rows += found.values()
    return rows


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Faster than either loop, with hardly more memory than the batch itself."""
    verdicts: list[Verdict] = []
    for case in cases_of(rows):
        mine = find(rows, case, OURS)
        over = None if mine is None else mine.median("over_percent")
        verdicts.append(at_most(NAME, f"{case}: peak above the batch", over, 5.0, "%"))
        for peer, least in ((ARRAYS, 1.0), (LISTS, 1.0 if case.endswith("experts") else 10.0)):
            words = f"{case}: time, {peer} by ours"
            verdicts.append(at_least(NAME, words, ratio(rows, case, "wall_ms", peer, OURS), least))
    return verdicts


BENCHMARK = Benchmark(
    name=NAME, words="samples into a batch of tensors", columns=COLUMNS, defaults=defaults, run=run, judge=judge
)

if __name__ == "__main__":
    from benchmarks.suite import main

    sys.exit(main([NAME, *sys.argv[1:]]))
