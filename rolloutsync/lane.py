"""A lane: what a fleet's driver keeps of one actor. The crew's lock guards it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from rolloutsync.order import Group, Order
    from rolloutsync.remote import Link
    from rolloutsync.sample import Sample

_AHEAD = 8  # more tasks than room, so that the actor has the next at hand; or an eighth of its room


class LaneState(str, Enum):
    """Whether an actor gets tasks."""

    JOINING = "joining"  # not there yet, or on its way back
    UP = "up"
    GONE = "gone"  # for good

    def __str__(self) -> str:
        return self.value


@dataclass(eq=False, slots=True)
class Work:
    """An order, and how often it has been begun in vain."""

    order: Order
    deliver: Callable[[Order, Sample], None]
    deaths: set[str] = field(default_factory=set)  # incarnations that were lost with it
    cuts: int = 0  # engine-wide aborts by this fleet when an actor last got it
    bounces: int = 0  # from actors without a live engine


@dataclass(eq=False, slots=True)
class Lane:
    """One actor."""

    link: Link
    host: str = ""  # where it runs, as engines' URLs name it
    urls: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)  # engines that it had: tasks with lower keys may be there
    born: tuple[str, ...] = ()  # the engines that each new process of its begins with
    state: LaneState = LaneState.JOINING
    reason: str = ""
    place: str = ""
    incarnation: str | None = None  # the last that was spoken to
    room: int = 0
    tasks: dict[int, Work] = field(default_factory=dict)  # by key
    due: int = 0  # number of the standing that last opened the gate, or closed it
    stood: int = -1  # number of the last standing that it is known to follow: it gets nothing before one that is due
    shy_until: float | None = None  # clock seconds: it did not take what it was given, so it gets nothing for a while
    heard: int = -1  # number of the standing under which its last report was made
    killed: bool = False  # by us, and not back yet
    loose: bool = False  # lost while it may live on, and send what it has been given
    thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Of the actor."""
        return self.link.name

    @property
    def starting(self) -> bool:
        """Whether it has never been there yet."""
        return self.state is LaneState.JOINING and self.incarnation is None

    @property
    def open(self) -> bool:
        """Whether it knows that tasks may come."""
        return self.state is LaneState.UP and self.stood >= self.due and self.shy_until is None

    @property
    def free(self) -> int:
        """Tasks that it may be given now."""
        if not self.open or self.room <= 0:
            return 0
        return self.room + max(_AHEAD, self.room // 8) - len(self.tasks)

    @property
    def load(self) -> float:
        """Tasks there for each that its engines take at once."""
        return len(self.tasks) / self.room if self.room > 0 else float("inf")

    def may_be_at(self, key: int, url: str) -> bool:
        """Whether a task has its request at an engine, as far as anybody knows.

        Of one that has just been sent nobody knows where it is. Of what was heard before the gate closed neither: it
        may have moved since.
        """
        engine = self.tasks[key].order.life.engine
        unsure = engine is None or self.heard < self.due
        return engine == url or (unsure and (url in self.urls or key < self.left.get(url, 0)))

    def leave(self, url: str) -> None:
        """Its new tasks do not go to an engine any more."""
        self.urls.remove(url)
        self.left[url] = max(self.tasks, default=-1) + 1

    def __str__(self) -> str:
        tail = f": {self.reason}" if self.reason else ""
        where = f" on {self.place}" if self.place else ""
        return f"{self.name}{where} is {self.state}, {len(self.tasks)} tasks, room for {self.room}{tail}"


def choose_lane(lanes: Iterable[Lane], group: Group) -> Lane | None:
    """The lane with room and the lowest load; the group's home while that has room. Groups move only if it has none.

    What is sticky stays at its home as long as that is up, and waits there for its engine.
    """
    able = [lane for lane in lanes if lane.free > 0]
    home = next((lane for lane in lanes if lane.name == group.home), None)
    if home is not None and group.sticky and home.state is LaneState.UP:
        return home if home.open else None
    if home is not None and home in able:
        return home
    best = min(able, key=lambda lane: lane.load, default=None)
    if best is not None:
        group.home = best.name
    return best
