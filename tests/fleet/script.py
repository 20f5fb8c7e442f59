"""A link whose actor is the test."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rolloutsync.order import new_rid
from rolloutsync.remote import Hello, LinkDead, LinkLost, Placed, Report, Standing, Task
from rolloutsync.sample import Sample

PATIENCE_S = 10.0
Failed = Callable[[Exception], None]


class ScriptedLink:
    """A link whose actor is the test: it sees what comes and says what it likes. Thread-safe.

    Args:
        name: Of the actor.
        room: That its hello names.
        up: Whether hello is answered; else it blocks until ``rise``, a kill or a loss.
    """

    def __init__(self, name: str = "actor-0", *, room: int = 4, up: bool = True) -> None:
        self.name = name
        self.room = room
        self.incarnation = new_rid()
        self.tasks: list[Task] = []  # that have come, in their order
        self.standings: list[Standing] = []
        self.aborted: list[list[int]] = []
        self.cuts: list[str] = []
        self.kills: list[bool] = []
        self.changes: list[tuple[list[str], list[str]]] = []
        self.spoken_to: list[str | None] = []  # as each hello named it
        self.refusal: Exception | None = None  # raised by take
        self.failures: list[Failed] = []  # of each take
        self.parcels: list[int] = []  # sizes
        self._changed = threading.Condition()
        self._up = up
        self._acknowledges = True
        self._lost: type[LinkLost] | None = None
        self._breaks = 0
        self._reports: deque[Report | None] = deque()

    # --- what the test says ---

    def rise(self, incarnation: str | None = None) -> None:
        with self._changed:
            self._up, self._lost = True, None
            self.incarnation = incarnation or new_rid()
            self._changed.notify_all()

    def lose(self, error: type[LinkLost] = LinkLost) -> None:
        with self._changed:
            self._lost, self._up = error, False
            self._breaks += 1
            self._reports.clear()
            self._changed.notify_all()

    def stall(self) -> None:
        """No standing is acknowledged any more."""
        self._acknowledges = False

    def acknowledge(self) -> None:
        """All are, and those to come."""
        with self._changed:
            self._acknowledges = True
            self._changed.notify_all()

    def say(
        self,
        ended: Iterable[tuple[int, Sample]] = (),
        placed: Iterable[Placed] = (),
        room: int | None = None,
        died_on: dict[int, tuple[str, ...]] | None = None,
    ) -> None:
        number = self.standings[-1].number
        with self._changed:
            report = Report(list(ended), list(placed), self.room if room is None else room, number, "", died_on or {})
            self._reports.append(report)
            self._changed.notify_all()

    def await_tasks(self, count: int) -> list[Task]:
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.tasks) >= count, PATIENCE_S)
            assert there, f"{len(self.tasks)} of {count} tasks have come to {self.name}"
            return list(self.tasks)

    # --- the link ---

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost(f"{self.name} cannot be reached")

    def hello(self, standing: Standing, incarnation: str | None) -> Hello:
        with self._changed:
            self.spoken_to.append(incarnation)
            self._changed.notify_all()
            while not self._up and not self._lost:
                self._changed.wait()
            self._check()
            self.standings.append(standing)
            return Hello(self.incarnation, self.room, "a script")

    def take(self, tasks: list[Task], incarnation: str, failed: Failed) -> None:
        if self.refusal is not None:
            raise self.refusal
        pickle.dumps(tasks)
        with self._changed:
            self.failures.append(failed)
            self.parcels.append(len(tasks))
            self.tasks += tasks
            self._changed.notify_all()

    def reports(self, incarnation: str) -> Iterator[Report]:
        begun = self._breaks
        while True:
            with self._changed:
                while not self._reports and self._breaks == begun:
                    self._changed.wait()
                if self._breaks != begun:
                    self._check()
                    raise LinkLost("lost, and back again")
                report = self._reports.popleft()
            if report is None:
                return
            yield report

    def stand(self, standing: Standing) -> Callable[[float], None]:
        with self._changed:
            self.standings.append(standing)
            self._changed.notify_all()

        def holds(seconds: float) -> None:
            with self._changed:
                if not self._changed.wait_for(lambda: self._acknowledges or self._lost, seconds):
                    raise LinkLost("no answer in time")
                self._check()

        return holds

    def abort(self, jobs: list[int], timeout: float) -> None:
        self.aborted.append(jobs)

    def cut(self, url: str) -> None:
        self.cuts.append(url)

    def members(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        self.changes.append((list(add), list(remove)))

    def kill(self, *, restart: bool) -> None:
        self.kills.append(restart)
        self.lose(LinkLost if restart else LinkDead)

    def close(self, timeout: float) -> None:
        with self._changed:
            self._reports.append(None)
            self._changed.notify_all()
