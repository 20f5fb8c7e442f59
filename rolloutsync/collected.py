"""What one collect brought: groups that are wanted, and everything else that it made."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rolloutsync.sample import Sample, Status

log = logging.getLogger("rolloutsync.collect")
_WHY = {
    "source": "the prompts ran out",
    "timeout": "its time was up",
    "aborted": "its requests were aborted by somebody else",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Collected:
    """What one ``collect`` brought: each item that it read is in exactly one of the four lists, in input order.

    A group is a list of n samples, by member; ``sample.index`` counts the items that the call read.

    Attributes:
        groups: Accepted; never more than ``target``.
        surplus: Finished, and not needed: nobody judged them, or the verdict came too late.
        rejected: Refused by ``accept``, or with a FAILED member.
        partials: Cut short: some members finished, some ABORTED with or without tokens. Pass them, and ``surplus`` too
            if you like, to the next call in front of its prompts: finished members stay, the others go on.
        target: As asked for.
        ended: Why it ended: "target", "source" (ran dry), "timeout", "aborted" (by a drain, by somebody else, or by
            ``close``), or "error" (in ``CollectError.collected``).
        read: How many items were taken from ``prompts``.
    """

    groups: list[list[Sample]]
    surplus: list[list[Sample]]
    rejected: list[list[Sample]]
    partials: list[list[Sample]]
    target: int
    ended: str
    read: int

    @property
    def complete(self) -> bool:
        """Whether the target was met."""
        return len(self.groups) >= self.target

    @property
    def samples(self) -> list[Sample]:
        """Those of ``groups``, as one flat list."""
        return [sample for group in self.groups for sample in group]

    @property
    def counts(self) -> dict[str, int]:
        """How many groups are in each list."""
        return {name: len(getattr(self, name)) for name in ("groups", "surplus", "rejected", "partials")}

    def __repr__(self) -> str:
        rest = ", ".join(f"{count} {name}" for name, count in self.counts.items() if name != "groups")
        return f"<Collected: {len(self.groups)} of {self.target} groups, {rest}; ended by {self.ended}>"


def tell(collected: Collected) -> None:
    """Warn, once each, of a target that was not met and of samples that failed."""
    if not collected.complete:
        level = logging.INFO if collected.ended == "aborted" else logging.WARNING
        met = f"{len(collected.groups)} of {collected.target} groups"
        log.log(level, "collect has %s: %s (%d items read)", met, _WHY[collected.ended], collected.read)
    failed = [sample for group in collected.rejected for sample in group if sample.status is Status.FAILED]
    if failed:
        log.warning("%d samples failed, and their groups were rejected; the first: %s", len(failed), failed[0].error)
