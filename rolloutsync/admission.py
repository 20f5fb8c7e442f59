"""Which order is next: the highest priority first, round-robin over jobs, in order within a job."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


class Admission(Generic[T]):
    """The waiting items. Not thread-safe: the lock of whoever owns it guards it."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, deque[T]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, items: Iterable[T], *, job: int, priority: int, first: bool = False) -> None:
        """Add a job's items behind those that it has waiting at that priority, or before them."""
        more = list(items)
        if more:
            line = self._levels.setdefault(priority, OrderedDict()).setdefault(job, deque())
            if first:
                line.extendleft(reversed(more))
            else:
                line.extend(more)
            self._size += len(more)

    def pop(self) -> T:
        """The next item. IndexError if there is none."""
        priority = max(self._levels, default=None)
        if priority is None:
            raise IndexError("nothing waits")
        jobs = self._levels[priority]
        job, line = next(iter(jobs.items()))
        item = line.popleft()
        self._size -= 1
        jobs.move_to_end(job)
        if not line:
            del jobs[job]
        if not jobs:
            del self._levels[priority]
        return item

    def take(self, job: int | None = None) -> list[T]:
        """Take everything out, or everything of one job."""
        taken: list[T] = []
        for priority, jobs in list(self._levels.items()):
            for number in list(jobs) if job is None else [job]:
                taken += jobs.pop(number, ())
            if not jobs:
                del self._levels[priority]
        self._size -= len(taken)
        return taken
