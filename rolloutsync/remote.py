"""What travels between a fleet's driver and its actors: tasks, reports, and what holds for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rolloutsync.sample import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rolloutsync.order import Order
    from rolloutsync.sample import Sample


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Task:
    """One sample that an actor is to make.

    Attributes:
        key: Names it between the two; a sample that is sent again gets another one.
        prompt: As this member is to send it: its seed is its own.
        index: Of the prompt in the batch.
        member: In its group.
        group: Number of the group, whose members stay together.
        size: Of the group.
        sticky: Whether the group waits for its engine (the turns of an episode, a session).
        job: Number of the job.
        priority: Higher first.
        closings: How many drains there had been when it was admitted: one more calls it off.
        seconds: Left of its batch's time; None for no limit.
        base: The partial that goes on.
        died_on: Engines that have died with it so far.
    """

    key: int
    prompt: Prompt
    index: int
    member: int
    group: int
    size: int
    sticky: bool
    job: int
    priority: int
    closings: int
    seconds: float | None
    base: Sample | None
    died_on: tuple[str, ...] = ()


class Placed(NamedTuple):
    """A request has left an actor for an engine."""

    key: int
    rid: str
    engine: str
    attempts: int


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """News of an actor.

    Attributes:
        ended: (key, sample) of tasks that have ended, each exactly once.
        placed: Requests that have left since the last report.
        room: Requests that its live engines take at once.
        why: What its engines are like, where there is no room.
        died_on: By key, the engines that died with tasks that have ended: what kills engines must not go on for ever.
        number: Of the standing that held when it was made. If that closes the gate, all that had left before has been
            reported by now, and nothing has left since.
    """

    ended: list[tuple[int, Sample]]
    placed: list[Placed]
    room: int
    number: int = -1
    why: str = ""
    died_on: dict[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Standing:
    """What holds for all actors from now on. A later one has a higher ``number`` and takes the place of all before.

    Attributes:
        mode: Of the gate: "open", "hold" or "abort".
        closings: Closings of the gate so far that ended what waited.
        cuts: Engine-wide aborts so far.
        expected: The version of the weights; None: any engine may join.
        versions: What engines call their weights, by URL, as far as the driver has been told.
        stale: Why engines may get no traffic, by URL: their weights are not those of the fleet.
        paused: URLs of engines that the driver holds paused.
    """

    number: int = 0
    mode: str = "open"
    closings: int = 0
    cuts: int = 0
    expected: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()

    def says(self) -> tuple[object, ...]:
        """All that it says, without its number."""
        return tuple(getattr(self, each.name) for each in fields(self) if each.name != "number")


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    """Who an actor is.

    Attributes:
        incarnation: Another one after each restart.
        room: As in a ``Report``.
        place: Where it runs, for people.
    """

    incarnation: str
    room: int
    place: str


_BARE = Prompt()


def slim_order(order: Order) -> tuple[Prompt, Sample | None]:
    """Prompt and partial as they travel to an actor: metadata stay with the driver, whatever is in them."""
    prompt, base = order.prompt, order.base
    if prompt.metadata:
        prompt = replace(prompt, metadata={})
    if base is not None:
        base = replace(base, metadata={}, prompt=replace(base.prompt, metadata={}))
    return prompt, base


def slim_sample(sample: Sample, order: Order) -> Sample:
    """A sample as it travels back: without its prompt, which the driver has, but for ids that an engine has told."""
    asked = order.prompt if order.base is None else order.base.prompt
    told = asked.input_ids is None and sample.prompt.input_ids is not None
    return replace(sample, prompt=Prompt(input_ids=sample.prompt.input_ids) if told else _BARE)


def whole_sample(sample: Sample, order: Order) -> Sample:
    """A sample that has come back, with prompt and metadata again."""
    blank = order.blank()
    prompt, ids = blank.prompt, sample.prompt.input_ids
    if prompt.input_ids is None and ids is not None:
        prompt = replace(prompt, input_ids=ids)
    return replace(sample, prompt=prompt, metadata=blank.metadata)


class LinkLost(Exception):  # noqa: N818 - an event, not always a fault
    """The actor cannot be reached for now; it may be back."""


class LinkDead(LinkLost):
    """The actor is gone for good."""


class Link(Protocol):
    """The way to one actor. Thread-safe. What blocks raises LinkLost, or LinkDead, when the actor is lost."""

    name: str

    def hello(self, standing: Standing, incarnation: str | None) -> Hello:
        """Block until the actor is there and stands so; ``incarnation`` is the one that was last spoken to."""

    def take(self, tasks: list[Task], incarnation: str, failed: Callable[[Exception], None]) -> None:
        """Hand tasks over, without waiting. ``failed`` is called, from any thread, if they do not arrive."""

    def reports(self, incarnation: str) -> Iterator[Report]:
        """Its news as they come; ends when the actor is closed."""

    def stand(self, standing: Standing) -> Callable[[float], None]:
        """Send it, and return what blocks until it holds, for at most so many seconds (then LinkLost)."""

    def abort(self, jobs: list[int], timeout: float) -> None:
        """Block until the requests of some jobs have been answered or cut."""

    def cut(self, url: str) -> None:
        """Shut the sockets of its requests at an engine. Does not wait."""

    def members(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        """Change which engines are its own. Does not wait."""

    def kill(self, *, restart: bool) -> None:
        """End the process at once; engines abort what it leaves behind when they see its sockets close."""

    def close(self, timeout: float) -> None:
        """Block until it has ended its requests, and has nothing to report but their ends. The process stays."""
