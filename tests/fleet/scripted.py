"""A crew without a client: its actors are the test, its time stands still unless told otherwise."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from rolloutsync import RetryPolicy
from rolloutsync.clock import ActiveTime, Clock, Deadline
from rolloutsync.crew import Crew
from rolloutsync.fleet_core import CrewFleet
from rolloutsync.lane import Lane
from rolloutsync.ledger import Ledger
from rolloutsync.order import Group, Order
from rolloutsync.remote import LinkLost, Placed, Task
from rolloutsync.sample import Sample, Status
from tests.fakes import FakeClock
from tests.fleet.script import ScriptedLink
from tests.unit.makers import order, prompt
from tests.wire import eventually

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


class WatchedCrew(Crew):
    """Counts how often its dispatcher has looked whether anybody can take anything."""

    looks = 0

    def _is_dry_locked(self) -> bool:
        self.looks += 1
        return super()._is_dry_locked()


class ScriptedCrew:
    """Some scripted actors, each with an engine of its own, and who they work for.

    Args:
        links: The actors; by default two with room for four each.
        clock: Time; a fake clock that stands still by default.
        engine_wait_s: As for ``Crew``.
        actor_wait_s: As for ``Crew``.
        shared: All use all engines.
        max_attempts: Of the policy.
    """

    def __init__(
        self,
        links: list[ScriptedLink] | None = None,
        *,
        clock: Clock | None = None,
        engine_wait_s: float = 10.0,
        actor_wait_s: float = 100.0,
        shared: bool = False,
        max_attempts: int = 3,
        hire: bool = True,
    ) -> None:
        self.clock = clock or FakeClock()
        self.links = links or [ScriptedLink("actor-0"), ScriptedLink("actor-1")]
        self.active = ActiveTime(self.clock)
        self.fleet = CrewFleet(
            self.clock, self.active, engine_wait_s=engine_wait_s, concurrency=None, on_trouble=lambda: None
        )
        self.ledger = Ledger()
        self.crew = WatchedCrew(
            self.fleet,
            self.ledger,
            self.clock,
            policy=RetryPolicy(max_attempts=max_attempts),
            engine_wait_s=engine_wait_s,
            actor_wait_s=actor_wait_s,
            shared=shared,
            name="rolloutsync-crew",
        )
        self.fleet.crew = self.crew
        self.done: list[tuple[Order, Sample]] = []
        self._changed = threading.Condition()
        urls = [list(URLS) if shared else [URLS[number % 2]] for number in range(len(self.links))]
        self.lanes = [Lane(link, "", part) for link, part in zip(self.links, urls, strict=True)]
        if hire:
            self.hire()

    def hire(self) -> None:
        self.crew.hire(self.lanes, self.fleet.standing())
        for lane, link in zip(self.lanes, self.links, strict=True):
            if link._up:
                eventually(lambda lane=lane: lane.state == "up", f"{link.name} is up")  # type: ignore[misc]

    # --- orders ---

    def order(self, **given: Any) -> Order:
        """An order as the driver's core would make it now."""
        return order(**{"closings": self.fleet.closings, "deadline": Deadline(self.active, None), **given})

    def admit(self, *orders: Order) -> None:
        self.crew.admit(list(orders), self._deliver)

    def orders(self, count: int, **given: Any) -> list[Order]:
        made = [self.order(**given) for _ in range(count)]
        self.admit(*made)
        return made

    def group(self, size: int, *, sticky: bool = False, index: int = 0, **given: Any) -> list[Order]:
        shared = Group(size, sticky=sticky)
        made = [self.order(index=index, member=member, group=shared, **given) for member in range(size)]
        self.admit(*made)
        return made

    def _deliver(self, of: Order, sample: Sample) -> None:
        with self._changed:
            self.done.append((of, sample))
            self._changed.notify_all()

    def await_done(self, count: int) -> list[Sample]:
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.done) >= count, 10.0)
            assert there, f"{len(self.done)} of {count} are delivered"
            return [sample for _, sample in self.done]

    def tick(self, seconds: float) -> None:
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(seconds)

    def look(self, seconds: float = 0.0) -> None:
        """So much time passes, and the dispatcher has looked since."""
        looked = self.crew.looks + 2
        self.tick(seconds)
        eventually(lambda: self._nudged() >= looked, "the dispatcher has looked")

    def _nudged(self) -> int:
        self.crew.grow()
        return self.crew.looks

    def lose(self, link: ScriptedLink, error: type[LinkLost] = LinkLost) -> None:
        """It is lost, and is being greeted again (or is given up)."""
        greeted, lane = len(link.spoken_to), self.lanes[self.links.index(link)]
        link.lose(error)
        eventually(lambda: self.rested() or len(link.spoken_to) > greeted or lane.state == "gone", "it is lost")

    def rested(self) -> bool:
        """A little time passes; never true."""
        self.tick(0.01)
        return False

    def rise(self, link: ScriptedLink, incarnation: str | None = None) -> None:
        lane = self.lanes[self.links.index(link)]
        link.rise(incarnation)
        eventually(lambda: self.rested() or lane.state == "up", f"{link.name} is up")

    def open(self) -> list[Order]:
        return self.ledger.book()[3]


def made(task: Task, status: Status = Status.COMPLETED, **given: Any) -> tuple[int, Sample]:
    """The task as it ended."""
    blank = order(prompt=task.prompt, index=task.index, member=task.member).blank()
    return task.key, replace(blank, **{"status": status, "attempts": 1, **given})


def at(task: Task, engine: str, rid: str | None = None) -> Placed:
    """The task's request has left for an engine."""
    return Placed(task.key, rid or f"{task.key:032x}", engine, 0)


__all__ = ["URLS", "ScriptedCrew", "at", "made", "prompt"]
