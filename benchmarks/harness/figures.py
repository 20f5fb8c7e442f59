"""Numbers of several runs: their spread, and whether a target was met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Spread:
    """Least, median and most of some runs."""

    least: float
    median: float
    most: float


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    numbers = sorted(values)
    if not numbers:
        raise ValueError("a spread needs at least one value")
    return Spread(numbers[0], median(numbers), numbers[-1])


@dataclass
class Row:
    """One client in one case of a benchmark: what each of its runs measured, by name."""

    benchmark: str
    case: str
    who: str
    runs: list[dict[str, float]] = field(default_factory=list)

    def spread(self, name: str) -> Spread | None:
        """Of one number over all runs; None where no run has it."""
        values = [run[name] for run in self.runs if name in run]
        return spread(values) if values else None

    def median(self, name: str) -> float | None:
        """Of one number over all runs."""
        found = self.spread(name)
        return None if found is None else found.median


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target: what was measured, and what it should be. Not measured where ``value`` is None."""

    benchmark: str
    words: str
    value: float | None
    limit: float
    at_least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """Whether it was met; None if it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def at_most(benchmark: str, words: str, value: float | None, limit: float, unit: str = "x") -> Verdict:
    """A target that less is good for."""
    return Verdict(benchmark=benchmark, words=words, value=value, limit=limit, unit=unit)


def at_least(benchmark: str, words: str, value: float | None, limit: float) -> Verdict:
    """A target that more is good for."""
    return Verdict(benchmark=benchmark, words=words, value=value, limit=limit, at_least=True)


def cases_of(rows: Sequence[Row]) -> list[str]:
    """In their order."""
    return list(dict.fromkeys(row.case for row in rows))


def find(rows: Sequence[Row], case: str, who: str) -> Row | None:
    """The row of one client in one case."""
    return next((row for row in rows if row.case == case and row.who == who), None)


def ratio(rows: Sequence[Row], case: str, name: str, over: str, under: str) -> float | None:
    """Median of ``over`` by median of ``under``; None where either was not measured."""
    top, bottom = find(rows, case, over), find(rows, case, under)
    if top is None or bottom is None:
        return None
    above, below = top.median(name), bottom.median(name)
    return above / below if above is not None and below else None
