"""A station: the actor's end of a fleet. Runs tasks on a core and keeps what is to be reported."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from rolloutsync.clock import Deadline
from rolloutsync.errors import Cut, RolloutError
from rolloutsync.gate import GateMode
from rolloutsync.order import Doing, Group, Life, Order, Stop, new_rid
from rolloutsync.remote import Hello, LinkLost, Placed, Report, Standing, slim_sample
from rolloutsync.slot import EngineState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rolloutsync.core import Core
    from rolloutsync.remote import Task
    from rolloutsync.sample import Sample

log = logging.getLogger("rolloutsync.station")
_LEARN_S = 10.0
_LOOK_S = 1.0
_RECOVER_S = 30.0
_GROUPS = 1024  # whose engines are remembered; a group that was left out longer loses but a warm cache
_ABORTED_JOBS = 4096
_REPORT_BYTES = 64 * 2**20
_BREATH_S = 0.01
_PLACED_S = 0.05  # where nothing has ended: only the books and the orphans of a dead actor want to know that


class _JobStop(Stop):
    """The signal of one job; its orders hold it."""

    __slots__ = ("__weakref__",)


_OFF = Stop()
_OFF.set()


class _TaskLife(Life):
    """Tells the station where each request of the task goes."""

    __slots__ = ("key", "station")

    def __init__(self, key: int, station: Station, died_on: tuple[str, ...]) -> None:
        super().__init__()
        self.died_on = died_on
        self.key = key
        self.station = station

    def now(self, doing: Doing, at: float) -> None:
        """It does something else from now on."""
        super().now(doing, at)
        if doing is Doing.ENGINE and self.rid is not None and self.engine is not None:
            self.station.placed(Placed(self.key, self.rid, self.engine, self.attempts))


class Station:
    """Makes samples for a driver elsewhere. Thread-safe.

    Args:
        core: Of the actor's client.
        place: Where this is, for people.
        alone: No other client uses these engines: what runs there when the station comes up again is an orphan.
    """

    def __init__(self, core: Core, place: str, *, alone: bool) -> None:
        self.incarnation = new_rid()
        self._core = core
        self._place = place
        self._alone = alone
        self._token = object()  # the gate's
        # _changed's lock guards: all that follows. Never held across I/O or a gate's closing.
        self._changed = threading.Condition()
        self._standing = Standing(number=-1)
        self._ended: list[tuple[int, Sample]] = []
        self._placed: list[Placed] = []
        self._room = -1  # as of the last report
        self._stands = -1  # number of the standing that holds
        self._told = -1  # as of the last report
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._stops: WeakValueDictionary[int, _JobStop] = WeakValueDictionary()
        self._aborted: deque[_JobStop] = deque(maxlen=_ABORTED_JOBS)  # the last ones: tasks of theirs may still come
        self._placed_at = float("-inf")  # of the first that is not reported yet
        self._died_on: dict[int, tuple[str, ...]] = {}  # by key, of what has ended
        self._told_at = float("-inf")  # clock seconds of the last report
        self._hurry = threading.Event()  # the next one must not wait
        self._reader = 0  # number of the newest: an older one, whose driver has lost it, takes nothing any more
        self._closed = False
        self._applying = threading.Lock()  # one standing after the other; held across the gate's changes

    # --- coming up ---

    def hello(self, standing: Standing, incarnation: str | None) -> Hello:
        """Learn the engines, leave nothing behind of whoever was here before, and stand as told. Blocks for that.

        A driver that spoke to another incarnation has lost one: what that left behind at engines which are this
        station's alone is aborted. One that spoke to this has given up what it sent, so that is aborted.
        """
        core = self._core
        core.ready(_LEARN_S)
        if incarnation == self.incarnation:
            self._start_over()
        elif incarnation is not None and self._alone:
            report = core.drainer.drain(_RECOVER_S, keep_closed=None, raise_on_timeout=False)
            log.info("came up again; what the one before left behind: %s", report)
        self.stand(standing)
        return Hello(self.incarnation, self._live_room(), self._place)

    # --- tasks ---

    def take(self, tasks: list[Task], incarnation: str) -> None:
        """Take tasks on: each will be reported exactly once. Does not block.

        Raises:
            LinkLost: They are for another incarnation, or this one is closed; nothing was taken.
        """
        with self._changed:
            self._check_locked(incarnation)
            closings = self._standing.closings
            orders = [self._order_locked(task, off=task.closings != closings) for task in tasks]
        try:
            self._core.workers.admit(orders, self._deliver)
        except (RolloutError, RuntimeError) as error:  # closed, or there is no thread to be had
            raise LinkLost(f"{len(tasks)} tasks were not taken: {error}") from error

    def _check_locked(self, incarnation: str) -> None:
        if incarnation != self.incarnation:
            raise LinkLost(f"this is incarnation {self.incarnation}, not {incarnation}")

    def _order_locked(self, task: Task, *, off: bool) -> Order:
        """``off``: a drain has come between; it ends ABORTED, unsent."""
        core = self._core
        return Order(
            prompt=task.prompt,
            index=task.index,
            member=task.member,
            group=self._group_locked(task),
            job=task.job,
            deadline=Deadline.after(core.fleet.active, task.seconds),
            admitted_at=core.clock.monotonic(),
            admitted_active=core.fleet.active.monotonic(),
            closings=core.fleet.closings,
            priority=task.priority,
            stops=(self._stop_locked(task.job), *([_OFF] if off else [])),
            life=_TaskLife(task.key, self, task.died_on),
            base=task.base,
        )

    def _stop_locked(self, job: int) -> _JobStop:
        stop = self._stops.get(job)
        if stop is None:
            stop = self._stops[job] = _JobStop()
        return stop

    def _group_locked(self, task: Task) -> Group:
        group = self._groups.pop(task.group, None) or Group(task.size, sticky=task.sticky)
        self._groups[task.group] = group
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        return group

    def _deliver(self, order: Order, sample: Sample) -> None:
        assert isinstance(order.life, _TaskLife)
        slim = slim_sample(sample, order)
        with self._changed:
            self._ended.append((order.life.key, slim))
            if order.life.died_on:
                self._died_on[order.life.key] = order.life.died_on
            if self._core.clock.monotonic() >= self._told_at + _BREATH_S:
                self._hurry.set()
            self._changed.notify_all()

    def placed(self, placed: Placed) -> None:
        """Note where a request goes, for whoever has to abort it should this process die."""
        with self._changed:
            self._placed.append(placed)
            if len(self._placed) == 1:
                self._placed_at = self._core.clock.monotonic()
                self._changed.notify_all()

    # --- reports ---

    def reports(self, incarnation: str) -> Iterator[Report]:
        """News, as soon as there are any; ends when the station is closed or somebody else reads.

        Raises:
            LinkLost: The news are another incarnation's.
        """
        with self._changed:
            self._check_locked(incarnation)
            self._reader += 1
            me = self._reader
            self._hurry.set()
            self._changed.notify_all()
        while (report := self._next(me)) is not None:
            yield report

    def _next(self, me: int) -> Report | None:
        while True:
            room = self._live_room()
            with self._changed:
                if not (self._closed or self._reader != me or self._has_news_locked(room)):
                    self._core.clock.wait(self._changed, _LOOK_S)
                if self._reader != me or (self._closed and not self._ended):
                    return None
                breath_s = self._breath_locked()
                if self._has_news_locked(room) and breath_s <= 0:
                    self._hurry.clear()
                    self._room, self._told, self._told_at = room, self._stands, self._core.clock.monotonic()
                    return self._report_locked(room)
            self._core.clock.sleep(min(breath_s, _BREATH_S), self._hurry)

    def _report_locked(self, room: int) -> Report:
        ended = self._portion_locked()
        died_on = {key: self._died_on.pop(key) for key, _ in ended if key in self._died_on}
        return Report(ended, self._taken_locked(), room, self._told, "" if room else self._trouble(), died_on)

    def _trouble(self) -> str:
        """What keeps the engines from having room."""
        told = [f"{status.url} is {status.state}, {status.reason}" for status in self._core.fleet.statuses()]
        return "; ".join(told) or "it has no engines"

    def _breath_locked(self) -> float:
        """Seconds until the next report: what ends or leaves meanwhile comes with it, at a fraction of the cost."""
        if self._hurry.is_set():
            return 0.0
        now = self._core.clock.monotonic()
        if self._ended or not self._placed:
            return self._told_at + _BREATH_S - now
        return self._placed_at + _PLACED_S - now

    def _has_news_locked(self, room: int) -> bool:
        return bool(self._ended or self._placed or room != self._room or self._told != self._stands)

    def _portion_locked(self) -> list[tuple[int, Sample]]:
        """What has ended; of large samples so many that a report stays of a size that an object store likes."""
        size = 0
        for count, (_, sample) in enumerate(self._ended):
            size += sum(each.nbytes for each in (sample.routed_experts, sample.hidden_states) if each is not None)
            if size > _REPORT_BYTES and count:
                portion, self._ended = self._ended[:count], self._ended[count:]
                return portion
        portion, self._ended = self._ended, []
        return portion

    def _taken_locked(self) -> list[Placed]:
        placed, self._placed = self._placed, []
        return placed

    def _live_room(self) -> int:
        return sum(status.limit for status in self._core.fleet.statuses() if status.state is EngineState.LIVE)

    # --- what holds for all ---

    def stand(self, standing: Standing) -> None:
        """Make it hold: from when this returns on, no request leaves against it. Older ones are ignored."""
        with self._applying:
            with self._changed:
                before = self._standing
                if standing.number <= before.number:
                    return
                self._standing = standing
            self._follow_weights(before, standing)
            self._follow_gate(before, standing)
            self._tell(standing)

    def _tell(self, standing: Standing) -> None:
        """Report that it holds, and where all is that has left: some of it may be about to say so itself."""
        leases = self._core.fleet.leases() if standing.mode != "open" else []
        with self._changed:
            for lease in leases:
                life = lease.order.life
                if isinstance(life, _TaskLife):
                    self._placed.append(Placed(life.key, lease.rid, lease.engine.front, life.attempts))
            self._stands = standing.number
            self._hurry.set()
            self._changed.notify_all()

    def _follow_weights(self, before: Standing, now: Standing) -> None:
        fleet, news = self._core.fleet, now.expected != before.expected
        doubtful = [url for url in now.stale if news or url not in before.stale]
        for engine in fleet.engines():
            if (engine.url in now.paused) != fleet.is_paused(engine.url):
                fleet.set_paused(engine.url, engine.url in now.paused)
            if engine.url in doubtful:
                engine.forget_version()
            elif news:
                engine.heard_version(now.versions.get(engine.url))
        if news and now.expected is not None:
            fleet.expected_version, fleet.expected_since = now.expected, self._core.clock.monotonic()
        for engine in fleet.engines(EngineState.LIVE) if news or doubtful else ():
            if reason := now.stale.get(engine.url) or fleet.staleness(engine):
                fleet.set_state(engine.url, EngineState.QUARANTINED, reason)

    def _follow_gate(self, before: Standing, now: Standing) -> None:
        fleet, mode = self._core.fleet, GateMode(now.mode)
        if now.closings > before.closings or mode is GateMode.ABORT:
            fleet.close_gate(self._token, GateMode.ABORT)
            self._core.workers.drop()
        if mode is GateMode.HOLD:
            fleet.close_gate(self._token, mode, cuts=now.cuts > before.cuts)
        elif mode is GateMode.OPEN:
            self._avoid(now.paused)
            fleet.open_gate(self._token)

    def _avoid(self, paused: frozenset[str]) -> None:
        """The gate opens while engines are paused: the driver could not continue them. They are continued first."""
        for engine in self._core.fleet.engines(EngineState.LIVE):
            if engine.url in paused:
                self._core.fleet.set_state(engine.url, EngineState.QUARANTINED, "paused, and was not continued")

    # --- calling off ---

    def abort(self, jobs: list[int], timeout: float) -> None:
        """End the tasks of some jobs: what waits at once, what is at engines by their answers, after ``timeout`` cut.

        Tasks of those jobs that arrive later end at once too.
        """
        with self._changed:
            stops = [self._stop_locked(job) for job in jobs]
            self._aborted.extend(stops)
        for stop in stops:
            stop.set()
        for job in jobs:
            self._core.workers.drop(job)
        self._core.fleet.wake()
        self._core.drainer.abort_own(timeout, of=lambda order: order.job in jobs)

    def _start_over(self) -> None:
        """The driver has given up all that is here, and sends it anew, under the same jobs' numbers.

        Under another incarnation, so that what it sent before, and what is only arriving now, is refused.
        """
        core = self._core
        with self._changed:
            self.incarnation = new_rid()
            self._reader += 1
            self._hurry.set()
            stops = list(self._stops.values())
            self._stops.clear()
            self._aborted.clear()
        for stop in stops:
            stop.set()
        core.workers.drop()
        core.fleet.wake()
        core.drainer.abort_own(_RECOVER_S, of=lambda _: True)
        with self._changed:
            self._ended, self._placed, self._died_on = [], [], {}

    def cut(self, url: str) -> None:
        """Shut the sockets of our requests at an engine."""
        for engine in self._core.fleet.engines():
            if engine.url == url:
                engine.cut(Cut.DRAIN)

    def close(self) -> None:
        """Nothing more is taken; readers end once they have read what there is."""
        with self._changed:
            self._closed = True
            self._hurry.set()
            self._changed.notify_all()
