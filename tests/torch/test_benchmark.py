"""What ``benchmarks/collate.py`` compares: the loops make the same batch as we do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.processes import ROOT

pytestmark = pytest.mark.torch
Part = Callable[[str], Any]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    """Imports a module of benchmarks/, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("who", ["lists", "arrays"])
@pytest.mark.parametrize("form", ["collate", "pack"])
def test_the_loops_make_our_batch(part: Part, form: str, who: str, layers: int) -> None:
    """All they measure is the same work."""
    window = part("harness.collate_window")
    samples = [*window.samples_of(2, 64, layers, 2), *window.samples_of(2, 40, layers, 2)]
    theirs, ours = window.batch_of(form, who, samples), window.batch_of(form, "ours", samples)
    assert len(theirs) == 6 + bool(layers)
    for name, tensor in theirs.items():
        if name == "versions":  # the loops pad with a number that is a version's
            assert torch.equal(tensor[ours["loss_mask"]], ours[name][ours["loss_mask"]])
        elif name == "position_ids" and form == "collate":
            there = ours["attention_mask"].bool()
            assert torch.equal(tensor[there], ours[name][there])
        else:
            assert torch.equal(tensor, ours[name]), name
        assert tensor.dtype == ours[name].dtype, name


def test_the_smoke_form_runs(part: Part) -> None:
    """Every case, in processes of their own; the loops are left out, for their time."""
    benchmark, options = part("collate"), part("harness.options")
    smoke = options.Form.SMOKE
    rows = benchmark.run(benchmark.defaults(smoke), options.Common(form=smoke, compare=False), lambda _: None)
    assert [row.who for row in rows] == ["ours"] * 4
    assert all(row.median("wall_ms") for row in rows)


def test_targets(part: Part) -> None:
    """Ten times quicker than lists, five percent above the batch."""
    runs = {"ours": (10.0, 2.0), "arrays": (20.0, 90.0), "lists": (150.0, 90.0)}
    rows = [
        part("harness.figures").Row("collate", "collate 512 x 8192", who, [{"wall_ms": wall, "over_percent": over}])
        for who, (wall, over) in runs.items()
    ]
    verdicts = part("collate").judge(rows)
    assert [(verdict.value, verdict.met) for verdict in verdicts] == [
        (2.0, True),
        (2.0, True),
        (15.0, True),
    ]
