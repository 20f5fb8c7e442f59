"""Two traces of one sequence side by side: the first difference in words, and the differences that are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .shape import Facts
from .steps import Step

SHOWN_FACTS = 12
ABSENT = "(absent)"


@dataclass(frozen=True)
class Known:
    """A difference that is left as it is: calls of one route, facts whose name begins so, and why."""

    route: str
    fact: str
    reason: str

    def covers(self, step: Step, name: str) -> bool:
        """Whether a difference is this one."""
        return step.route == self.route and name.startswith(self.fact)


KNOWN = (
    Known("GET /model_info", "call body.embedding", "a block about embedding models, of no use to a rollout"),
    Known("GET /get_model_info", "call body.embedding", "the same under its old name"),
)


@dataclass(frozen=True)
class Difference:
    """One fact of one step that is not the same on both sides."""

    index: int
    step: Step
    name: str
    left: str
    right: str

    @property
    def known(self) -> Known | None:
        """The entry of the table that covers it."""
        return next((entry for entry in KNOWN if entry.covers(self.step, self.name)), None)


def differences(steps: Sequence[Step], left: Sequence[Facts], right: Sequence[Facts]) -> Iterator[Difference]:
    """Yields every difference between two traces of the same steps, in order."""
    for index, (step, ours, theirs) in enumerate(zip(steps, left, right, strict=True)):
        for name in sorted(ours.keys() | theirs.keys()):
            one, other = ours.get(name, ABSENT), theirs.get(name, ABSENT)
            if one != other:
                yield Difference(index, step, name, one, other)


def report(title: str, sides: tuple[str, str], steps: Sequence[Step], found: Sequence[Difference]) -> str:
    """Returns the first step that differs, readably: what led to it, and what each side said."""
    first = found[0].index
    facts = [each for each in found if each.index == first]
    width = max(map(len, sides))
    lines = [f"{title}: step {first} differs"]
    lines += [f"  {index:3}. {step}" for index, step in enumerate(steps[: first + 1])]
    for each in facts[:SHOWN_FACTS]:
        lines += [
            f"    {each.name}",
            f"      {sides[0]:{width}}  {each.left}",
            f"      {sides[1]:{width}}  {each.right}",
        ]
    if len(facts) > SHOWN_FACTS:
        lines.append(f"    and {len(facts) - SHOWN_FACTS} more facts")
    return "\n".join(lines)


def unanswered(steps: Sequence[Step], trace: Sequence[Facts]) -> list[str]:
    """Returns the steps that did not bring an answer that the sequence expects of any engine."""
    return [
        f"step {index}, {step}: {', '.join(name for name, fact in facts.items() if fact == 'unanswered')}"
        for index, (step, facts) in enumerate(zip(steps, trace, strict=True))
        if "unanswered" in facts.values()
    ]
