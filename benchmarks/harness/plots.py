"""A picture of what was measured: each client's CPU by ours, case by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.harness.figures import Row, cases_of
from benchmarks.peers import PEERS

mpl.use("Agg")
from matplotlib import pyplot as plt

_SVG = {"svg.fonttype": "none", "svg.hashsalt": "benchmarks"}  # small, and the same for the same figures

_COLOURS = {
    "ours": "#d1495b",
    "aiohttp": "#30638e",
    "httpx": "#00798c",
    "requests": "#edae49",
    "uvloop": "#5b8fb9",
    "raw": "#9a9a9a",
}
_NAMES = {
    "ours": "rolloutsync",
    "aiohttp": "aiohttp + orjson",
    "httpx": "httpx + json",
    "requests": "threads + requests",
    "uvloop": "aiohttp + orjson on uvloop",
    "raw": "raw sockets (the floor)",
}
_METRIC = "cpu_ms"
_BAR = 0.8
_INK = "#444444"  # legible on light and on dark pages


def panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """(title, rows) of each case that has several clients with CPU figures."""
    names = list(dict.fromkeys(row.benchmark for row in rows))
    found = [(name, case) for name in names for case in cases_of([row for row in rows if row.benchmark == name])]
    grouped = [
        (f"{name}: {case}", [row for row in rows if (row.benchmark, row.case) == (name, case) and row.who in PEERS])
        for name, case in found
    ]
    shown = [(title, [row for row in some if row.median(_METRIC) is not None]) for title, some in grouped]
    return [(title, some) for title, some in shown if len(some) > 1]


def draw(rows: Sequence[Row], facts: Mapping[str, Any], file: Path) -> None:
    """Write a picture: .svg or .png, by the name."""
    found = panels(rows)
    if not found:
        return
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 0.6 + 1.9 * lines), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (title, some) in zip(axes.flat, found, strict=False):
        axis.set_visible(True)
        _draw_case(axis, title, some)
    figure.suptitle("CPU of the client process, ms for each answer (median; less is better)", color=_INK, fontsize=11)
    figure.text(0.01, 0.005, footnote(facts), fontsize=6.5, color=_INK)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    with mpl.rc_context(_SVG):
        figure.savefig(file, transparent=False, facecolor="white", dpi=110, metadata=_metadata(file))
    plt.close(figure)


def _draw_case(axis: Any, title: str, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: -(row.median(_METRIC) or 0.0))
    values = [row.median(_METRIC) or 0.0 for row in ordered]
    bars = axis.barh([_NAMES[row.who] for row in ordered], values, _BAR, color=[_COLOURS[row.who] for row in ordered])
    axis.bar_label(bars, [f" {value:.3g}" for value in values], fontsize=8, color=_INK)
    axis.set_title(title, fontsize=9, color=_INK, loc="left")
    axis.set_xlim(0, 1.18 * max(values))
    axis.tick_params(axis="y", labelsize=8, length=0, colors=_INK)
    axis.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)


def footnote(facts: Mapping[str, Any]) -> str:
    """On what it was measured, on one line."""
    libraries = facts["libraries"]
    shown = ", ".join(f"{name} {libraries[name]}" for name in ("aiohttp", "httpx", "requests") if libraries.get(name))
    return f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}; {shown}; commit {facts['commit']}"


def _metadata(file: Path) -> dict[str, Any] | None:
    """Without the date: the same figures give the same file."""
    return {"Date": None} if file.suffix == ".svg" else None
