"""Fleets of actors for tests: made with options of their own, looked into from outside, and gone afterwards."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rolloutsync import Sample
from rolloutsync.sim import SimFleet
from tests.processes import alive, await_true
from tests.ray.conftest import OPTIONS, pid_of

if TYPE_CHECKING:
    from rolloutsync.ray_fleet import RolloutFleet

FLEET: dict[str, Any] = {**OPTIONS, "timeouts": replace(OPTIONS["timeouts"], engine_wait_s=30.0)}  # actors start slowly

MakeFleet = Callable[..., "RolloutFleet"]


@contextmanager
def fleets(urls: Sequence[str]) -> Iterator[MakeFleet]:
    """Makes fleets of two actors, unless told otherwise; at the end they are closed, and no process is left of them."""
    from rolloutsync.ray_fleet import RolloutFleet

    made: list[RolloutFleet] = []

    def make(some: Any = None, *, actor_options: Any = None, **options: Any) -> RolloutFleet:
        given = {"actors": 2, "actor_options": {"num_cpus": 0, **(actor_options or {})}, **FLEET, **options}
        if "actors_per_node" in given:
            del given["actors"]
        made.append(RolloutFleet(list(urls) if some is None else some, **given))
        return made[-1]

    try:
        yield make
    finally:
        for fleet in made:
            end(fleet)


def end(fleet: RolloutFleet) -> None:
    """Close it, and await the end of its actors' processes."""
    left = pids(fleet) if sys.modules["ray"].is_initialized() else []
    fleet.close()
    for pid in left:
        await_true(lambda pid=pid: not alive(pid), f"the end of the actor's process {pid}")  # type: ignore[misc]


def pids(fleet: RolloutFleet) -> list[int]:
    """The processes of those actors that are there."""
    ray = sys.modules["ray"]
    found = []
    for actor in fleet.actors:
        try:
            found.append(pid_of(ray, actor))
        except ray.exceptions.RayError:
            continue
    return found


def kill(fleet: RolloutFleet, number: int) -> int:
    """SIGKILL for an actor's process, and its pid, once that is gone; Ray may restart the actor."""
    pid = pid_of(sys.modules["ray"], fleet.actors[number])
    os.kill(pid, signal.SIGKILL)
    await_true(lambda: not alive(pid), f"the end of the process {pid}")
    return pid


def warm(fleet: RolloutFleet) -> None:
    """Await every actor; so that a test's own batch finds all of them."""
    from tests.client.kit import params

    fleet.generate([[3]], params(1))
    await_true(lambda: up(fleet) == len(fleet.actors), lambda: f"all actors: {fleet.dump()}", 60.0)


def up(fleet: RolloutFleet) -> int:
    """How many actors get tasks, by the fleet's own word."""
    return lines(fleet, " is up, ")


def lines(fleet: RolloutFleet, words: str) -> int:
    """How many actors are said to be so."""
    return sum(words in line for line in fleet.dump().rpartition("actors:")[2].splitlines())


def tasks(fleet: RolloutFleet) -> list[int]:
    """How many samples each actor has to make."""
    told = fleet.dump().rpartition("actors:")[2].splitlines()
    return [int(line.partition(" tasks")[0].rpartition(" ")[2]) for line in told if " tasks" in line]


def homes(samples: Sequence[Sample]) -> dict[int, set[str | None]]:
    """The engines of each group, by the prompt's number."""
    found: dict[int, set[str | None]] = {}
    for sample in samples:
        found.setdefault(sample.index, set()).add(sample.engine)
    return found


def states(sim: SimFleet) -> list[Counter[str]]:
    """How the generations of each engine stand or ended, as the engine tells it."""
    return [Counter(row["state"] for row in engine.state()["generations"]) for engine in sim.engines]


def rids_of(sim: SimFleet, *wanted: str) -> set[str]:
    """Ids of the generations that are, or ended, so."""
    rows = [row for engine in sim.engines for row in engine.state()["generations"]]
    return {row["rid"] for row in rows if row["state"] in wanted}
