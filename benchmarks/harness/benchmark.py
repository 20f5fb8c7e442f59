"""What a benchmark is to the suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.cases import Tell
from benchmarks.harness.figures import Row, Verdict
from benchmarks.harness.options import Common, Form


@dataclass(frozen=True, kw_only=True)
class Column:
    """One number in a table.

    Attributes:
        name: In the runs of a row.
        title: For people.
        digits: After the point.
        spread: Whether least and most are shown beside the median.
        ratio: Whether a column follows with the median by ours.
    """

    name: str
    title: str
    digits: int = 2
    spread: bool = False
    ratio: bool = False


WINDOW = (
    Column(name="wall_s", title="wall, s", spread=True),
    Column(name="cpu_ms", title="CPU, ms each", digits=3, spread=True, ratio=True),
    Column(name="per_s", title="per second", digits=0, ratio=True),
    Column(name="peak_mb", title="peak, MB", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One of the suite.

    Attributes:
        name: On the command line.
        words: What it measures, on one line.
        columns: Of its table.
        defaults: Its options, a frozen dataclass, for a form.
        run: Measures; takes its options and the common ones.
        judge: Its targets.
    """

    name: str
    words: str
    columns: Sequence[Column]
    defaults: Callable[[Form], Any]
    run: Callable[[Any, Common, Tell], list[Row]]
    judge: Callable[[Sequence[Row]], list[Verdict]]
