"""An order: one sample to be made, with its place in the batch and the ways in which it may be called off."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from rolloutsync.sample import begin

if TYPE_CHECKING:
    from rolloutsync.clock import Deadline
    from rolloutsync.sample import Prompt, Sample


_numbers = itertools.count()


class Stop:
    """A one-way signal: whoever waits for it looks when the fleet wakes it. Thread-safe by being one bit."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Call off."""
        self.is_set = True


class Group:
    """The members of one prompt. Its home is where the first of them went; guarded by the fleet's lock.

    A sticky one (the turns of an episode) waits at its home for room, and moves only if that is not live any more.
    Its number is its own within this process.
    """

    __slots__ = ("__weakref__", "home", "number", "rank", "size", "sticky")

    def __init__(self, size: int, *, sticky: bool = False) -> None:
        self.size = size
        self.sticky = sticky
        self.number = next(_numbers)
        self.home: str | None = None
        self.rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A sample that is wanted, its place in the batch, and the partial that it goes on from."""

    prompt: Prompt
    index: int
    member: int
    group: Group
    base: Sample | None = None


class Doing(str, Enum):
    """What an open sample is doing."""

    QUEUED = "waits for a thread"
    PLACE = "waits for an engine"
    ENGINE = "is at the engine"
    ORPHAN = "aborts its broken request"
    REST = "rests before another attempt"
    ACTOR = "is at an actor"

    def __str__(self) -> str:
        return self.value


class Life:
    """How far an open sample has come, for people who ask.

    Written by the threads that make the sample, one at a time, read by any; each field is one reference. Only
    ``died_on`` decides anything: the engines that died while the sample ran there, see ``rolloutsync.fleet``.
    """

    __slots__ = ("attempts", "died_on", "doing", "engine", "rid", "since")

    def __init__(self) -> None:
        self.attempts = 0
        self.doing = Doing.QUEUED
        self.engine: str | None = None
        self.rid: str | None = None
        self.since: float | None = None  # clock seconds; None: since it was admitted
        self.died_on: tuple[str, ...] = ()

    def now(self, doing: Doing, at: float) -> None:
        """It does something else from now on."""
        self.doing, self.since = doing, at


@dataclass(slots=True, eq=False, kw_only=True)  # not frozen, as that takes twice as long
class Order:
    """One sample to be made. Never changed.

    Attributes:
        job: Number of the job that it belongs to.
        priority: Higher first.
        deadline: Of the whole batch, on active time.
        stops: Any of them set means: end ABORTED.
        admitted_at: Clock seconds.
        admitted_active: Seconds of active time.
        closings: How many drains there had been when it was admitted: one more calls it off.
        life: How far it has come.
        base: The partial that goes on; ``prompt`` then has its tokens. None for a fresh sample.
        calls_back: Its delivery runs the user's code, which may block.
    """

    prompt: Prompt
    index: int
    member: int
    group: Group
    job: int
    deadline: Deadline
    admitted_at: float
    admitted_active: float = 0.0
    closings: int = 0
    priority: int = 0
    stops: tuple[Stop, ...] = ()
    life: Life = field(default_factory=Life)
    base: Sample | None = None
    calls_back: bool = False

    @property
    def stopped(self) -> bool:
        """Whether it was called off."""
        for stop in self.stops:  # noqa: SIM110 - asked several times for each request: no generator
            if stop.is_set:
                return True
        return False

    def blank(self) -> Sample:
        """The sample as it was when it was admitted: with nothing generated yet, or the partial that goes on."""
        if self.base is None:
            return begin(self.prompt, self.index, self.member)
        return replace(self.base, index=self.index, member=self.member)

    def news(self, sample: Sample) -> tuple[int, int]:
        """(tokens, attempts) of an ended sample that came after it was admitted."""
        tokens, attempts = len(sample.output_ids), sample.attempts
        if self.base is None:
            return tokens, attempts
        return tokens - len(self.base.output_ids), attempts - self.base.attempts


_random = random.Random()  # noqa: S311 - ids need not be secret. Our own: users seed the shared one alike in all processes
os.register_at_fork(after_in_child=_random.seed)


def new_rid() -> str:
    """A request id: always 32 hex characters, since SGLang aborts every rid that begins with the one named.

    Not from ``os.urandom`` each time: its system call lets another thread run, for which this one then waits.
    """
    return f"{_random.getrandbits(128):032x}"
