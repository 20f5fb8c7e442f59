"""Tables of what was measured, with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness.benchmark import Benchmark, Column
from benchmarks.harness.figures import Row, Spread, Verdict, ratio

OURS = "ours"
_WIDTH = 150
_CAPTION = "medians (least most)"
_WORDS = {True: "met", False: "NOT met", None: "not measured"}


def make_console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def results_table(benchmark: Benchmark, rows: Sequence[Row]) -> Table:
    """A line for each client in each case."""
    columns = [column for column in benchmark.columns if any(row.median(column.name) is not None for row in rows)]
    table = Table(title=f"{benchmark.name}: {benchmark.words}", title_justify="left", caption=_CAPTION)
    table.add_column("case", no_wrap=True)
    table.add_column("client", no_wrap=True)
    table.add_column("runs", justify="right")
    for title in (title for column in columns for title in _titles(column)):
        table.add_column(title, justify="right", no_wrap="(" not in title and len(title) < 10)
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1].case != row.case
        cells = [cell for column in columns for cell in _cells(column, row, rows)]
        table.add_row(row.case, row.who, str(len(row.runs)), *cells, end_section=last)
    return table


def _titles(column: Column) -> list[str]:
    return [column.title, "by ours"] if column.ratio else [column.title]


def _cells(column: Column, row: Row, rows: Sequence[Row]) -> list[str]:
    found = row.spread(column.name)
    cells = ["" if found is None else shown(found, column)]
    if column.ratio:
        times = ratio(rows, row.case, column.name, row.who, OURS)
        cells.append("" if times is None or row.who == OURS else f"{times:.2f} x")
    return cells


def shown(spread: Spread, column: Column) -> str:
    """A median, with least and most where wanted."""
    digits = column.digits
    text = f"{spread.median:.{digits}f}"
    single = spread.least == spread.most or not column.spread
    return text if single else f"{text} ({spread.least:.{digits}f} {spread.most:.{digits}f})"


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    """A line for each target."""
    table = Table(title="targets: ratios of medians in this run", title_justify="left")
    for title in ("benchmark", "target", "limit", "measured", "verdict"):
        table.add_column(title, justify="right" if title in {"limit", "measured"} else "left")
    for verdict in verdicts:
        sign = "≥" if verdict.at_least else "≤"
        measured = "" if verdict.value is None else f"{verdict.value:.2f} {verdict.unit}"
        limit = f"{sign} {round(verdict.limit, 2):g} {verdict.unit}"
        style = {True: "green", False: "bold red", None: "dim"}[verdict.met]
        table.add_row(verdict.benchmark, verdict.words, limit, measured, f"[{style}]{_WORDS[verdict.met]}[/]")
    return table
