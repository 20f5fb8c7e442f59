"""The actors of a fleet: their lives, and what concerns all of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.errors import RolloutError
from rolloutsync.lane import Lane, LaneState, Work
from rolloutsync.remote import LinkDead
from rolloutsync.threads import fan_out, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rolloutsync.clock import Clock
    from rolloutsync.fleet import Fleet
    from rolloutsync.order import Order
    from rolloutsync.remote import Report, Standing

log = logging.getLogger("rolloutsync.crew")
STACK_BYTES = 8 * 2**20  # of threads that pickle and unpickle what users send
_REST_S = 0.5
_STAND_S = 10.0  # an actor that does not take a closed gate for so long is killed: it might send what nobody expects
_ORPHAN_S = 5.0


class Actors:
    """The lanes of a crew. Thread-safe. See ``Crew`` for the arguments."""

    def __init__(self, fleet: Fleet, clock: Clock, *, actor_wait_s: float, shared: bool, name: str) -> None:
        self._fleet = fleet
        self._clock = clock
        self._actor_wait_s = actor_wait_s
        self._shared = shared
        self._name = name
        # _lock guards: all that follows, all lanes, and what the crew adds. Never held across I/O or a link's calls.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lanes: list[Lane] = []
        self._standing: Standing | None = None
        self._closed = False

    def _heard(self, lane: Lane, report: Report) -> None:
        """An actor has news."""
        raise NotImplementedError

    def _again(self, works: list[Work], reason: str, lane: Lane, incarnation: str | None) -> None:
        """An actor was lost with these."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        with self._lock:
            return self._closed

    @property
    def lanes(self) -> list[str]:
        """A line about each actor."""
        with self._lock:
            return [str(lane) for lane in self._lanes]

    # --- one actor's life ---

    def hire(self, lanes: list[Lane], standing: Standing) -> None:
        """Take actors on; each gets tasks once it has said hello. Does not block."""
        with self._lock:
            self._lanes, self._standing = lanes, standing
            for lane in lanes:
                lane.born = tuple(lane.urls)
                lane.thread = start_thread(
                    f"{self._name}-{lane.name}", _bind(self._serve, lane), stack_bytes=STACK_BYTES
                )

    def _serve(self, lane: Lane) -> None:
        """Say hello, read reports; when the actor is lost, give its tasks to others, and again."""
        given_up = Deadline.after(self._clock, self._actor_wait_s)
        while True:
            try:
                incarnation = self._greet(lane)
                given_up = Deadline.after(self._clock, None)
                for report in lane.link.reports(incarnation):
                    self._heard(lane, report)
                reason, dead = "it sends no more reports", False
            except LinkDead as error:
                reason, dead = str(error), True
            except Exception as error:  # noqa: BLE001 - a thread's outermost frame: whatever it is, the actor is lost
                reason, dead = str(error) or type(error).__name__, False
            if self.is_closed:
                return
            if given_up.remaining() is None:
                given_up = Deadline.after(self._clock, self._actor_wait_s)
            if dead or given_up.expired:
                self._bury(lane, reason)
                return
            self._lose(lane, reason)
            self._fleet.nap(_REST_S)

    def _greet(self, lane: Lane) -> str:
        """Block until the actor is there and stands as everybody does."""
        while True:
            with self._lock:
                standing, before = self._standing, lane.incarnation
            assert standing is not None
            hello = lane.link.hello(standing, before)
            self._tell_members(lane)
            with self._lock:
                lane.incarnation, lane.place = hello.incarnation, hello.place
                if self._standing is standing:
                    lane.state, lane.reason, lane.room = LaneState.UP, "", hello.room
                    lane.stood = lane.heard = standing.number
                    lane.loose, lane.killed, lane.shy_until = False, False, None
                    self._changed.notify_all()
                    break
        log.info("actor %s is up: %s", lane.name, hello.place)
        return hello.incarnation

    def _tell_members(self, lane: Lane) -> None:
        """A new process knows the engines of its birth alone."""
        with self._lock:
            add = [url for url in lane.urls if url not in lane.born]
            remove = [url for url in lane.born if url not in lane.urls]
        if add or remove:
            lane.link.members(add=add, remove=remove)

    def _lose(self, lane: Lane, reason: str) -> None:
        """An actor is away: its tasks go elsewhere, once what they left at engines has been told to end."""
        with self._lock:
            new = lane.state is LaneState.UP or lane.reason != reason
            lane.loose |= lane.state is LaneState.UP and not lane.killed
            lane.state, lane.reason, lane.room = LaneState.JOINING, reason, 0
            incarnation = lane.incarnation
            works, lane.tasks = list(lane.tasks.values()), {}
            self._changed.notify_all()
        if new:
            log.warning("actor %s is lost, with %d tasks: %s", lane.name, len(works), reason)
        self._abort_orphans([work.order for work in works])
        self._again(works, reason, lane, incarnation)

    def _bury(self, lane: Lane, reason: str) -> None:
        """An actor is gone for good: so is its name, and its engines are others' from now on."""
        lane.link.kill(restart=False)
        self._lose(lane, reason)
        with self._lock:
            lane.state = LaneState.GONE
            urls, lane.urls = lane.urls, []
            heirs = [other for other in self._lanes if other.state is not LaneState.GONE]
            self._changed.notify_all()
        log.error("actor %s is gone for good, %d are left: %s", lane.name, len(heirs), reason)
        for url in urls if heirs and not self._shared else ():
            self.join_engine(url, "")

    def _abort_orphans(self, orders: Iterable[Order]) -> None:
        """Their requests have lost their sockets, on which engines abort them sooner or later; tell them now."""
        by_engine: dict[str, list[str]] = defaultdict(list)
        for order in orders:
            if order.life.engine is not None and order.life.rid is not None:
                by_engine[order.life.engine].append(order.life.rid)
        fan_out(f"{self._name}-orphans", [_bind_abort(self._abort_at, url, rids) for url, rids in by_engine.items()])

    def _abort_at(self, url: str, rids: list[str]) -> None:
        deadline = Deadline.after(self._clock, _ORPHAN_S)
        for engine in self._fleet.engines():
            if engine.url != url:
                continue
            for number, rid in enumerate(rids):
                try:
                    engine.abort(rid, deadline=deadline)
                except RolloutError as error:
                    for left in rids[number:]:
                        self._fleet.note_orphan(url, left)
                    log.warning("%d requests may run on at %s: %s", len(rids) - number, url, error.message)
                    return

    # --- engines ---

    def join_engine(self, url: str, host: str) -> None:
        """Give an engine to the actor that has the fewest, one on the same host if there is; shared: to all.

        Once: nothing is done where it has been given.
        """
        with self._lock:
            there = [lane for lane in self._lanes if lane.state is not LaneState.GONE]
            if any(url in lane.urls for lane in there):
                return
            near = [lane for lane in there if lane.host == host] or there
            chosen = there if self._shared else sorted(near, key=lambda lane: len(lane.urls))[:1]
            for lane in chosen:
                lane.urls.append(url)
                lane.left.pop(url, None)
        for lane in chosen:
            lane.link.members(add=[url])

    def leave_engine(self, url: str) -> None:
        """Send nothing more to an engine; requests there finish."""
        with self._lock:
            owners = [lane for lane in self._lanes if url in lane.urls]
            for lane in owners:
                lane.leave(url)
        for lane in owners:
            lane.link.members(remove=[url])

    # --- what concerns all ---

    def stand(self, standing: Standing, *, wait: bool) -> None:
        """Make it hold everywhere; with ``wait``, block until it does. An actor that does not follow is killed.

        1. A makes a standing that closes the gate. 2. B makes another and sends it first. 3. A's is old by now and is
        not sent; but A counts on a closed gate, so B's is sent once more and waited for. Actors take it in once.
        """
        with self._lock:
            if self._closed or self._standing is None:
                return
            if standing.number > self._standing.number:
                self._follow_locked(standing)
            elif not wait:
                return
            newest = self._standing
            there = [lane for lane in self._lanes if lane.state is LaneState.UP]
            loose = self._take_loose_locked() if newest.mode != "open" else []
        for lane in loose:
            log.warning("actor %s cannot be told to stop, and is killed", lane.name)
            lane.link.kill(restart=True)
        sent = [(lane, lane.link.stand(newest)) for lane in there]
        if wait:
            self._await_held(newest, sent)

    def knows(self, standing: Standing) -> bool:
        """Whether actors have been sent all that it says."""
        with self._lock:
            return self._standing is not None and self._standing.says() == standing.says()

    def _follow_locked(self, standing: Standing) -> None:
        before, self._standing = self._standing, standing
        if before is None or (before.mode == "open") != (standing.mode == "open"):
            for lane in self._lanes:
                lane.due = standing.number
        self._changed.notify_all()

    def _take_loose_locked(self) -> list[Lane]:
        """Actors that are out of reach while their processes may live on. Each is told of once."""
        loose = [lane for lane in self._lanes if lane.loose and lane.state is LaneState.JOINING]
        for lane in loose:
            lane.loose = False
        return loose

    def _await_held(self, standing: Standing, sent: list[tuple[Lane, Callable[[float], None]]]) -> None:
        until = Deadline.after(self._clock, _STAND_S)
        for lane, holds in sent:
            try:
                holds(until.remaining() or 0.0)
            except Exception as error:  # noqa: BLE001 - whatever it was: nobody knows what this actor sends now
                log.warning("actor %s does not follow, and is killed: %s", lane.name, error)
                lane.killed = True
                lane.link.kill(restart=True)
            else:
                self._stands(lane, standing)

    def _stands(self, lane: Lane, standing: Standing) -> None:
        with self._lock:
            lane.stood = max(lane.stood, standing.number)
            self._changed.notify_all()

    def abort(self, of: Callable[[Order], bool], timeout: float) -> None:
        """Abort the jobs of some orders, and block until their requests have ended, or were cut at the timeout."""
        with self._lock:
            jobs = [(lane, {work.order.job for work in lane.tasks.values() if of(work.order)}) for lane in self._lanes]
        calls = [_bind_jobs(lane, sorted(numbers), timeout) for lane, numbers in jobs if numbers]
        fan_out(f"{self._name}-abort", calls)

    def cut(self, url: str) -> None:
        """Shut the sockets of our requests at an engine. Does not wait."""
        with self._lock:
            there = [lane for lane in self._lanes if lane.state is LaneState.UP]
            lanes = [lane for lane in there if url in lane.urls or url in lane.left]
        for lane in lanes:
            lane.link.cut(url)

    def rids(self, url: str, of: Callable[[Order], bool] = lambda _: True) -> list[str]:
        """Ids of requests that are at an engine, or may be."""
        with self._lock:
            lives = [
                work.order.life
                for lane in self._lanes
                for key, work in lane.tasks.items()
                if lane.may_be_at(key, url) and of(work.order)
            ]
            return [life.rid or "not known yet" for life in lives]

    def in_flight(self) -> Counter[str]:
        """Requests by the engine that they are known to be at."""
        with self._lock:
            lives = [work.order.life for lane in self._lanes for work in lane.tasks.values()]
            return Counter(life.engine for life in lives if life.engine is not None)

    def await_none(self, url: str, seconds: float, of: Callable[[Order], bool] = lambda _: True) -> bool:
        """Block until nothing of ours is at an engine, for at most ``seconds``; whether that is so."""
        until = Deadline.after(self._clock, seconds)
        with self._lock:
            while (left := self.rids(url, of)) and not until.expired:
                self._clock.wait(self._changed, until.remaining())
        return not left

    # --- the end ---

    def dismiss(self, timeout: float) -> None:
        """Let every actor end what it has, and end it. Blocks for about ``timeout`` seconds at most.

        One that is not there has nothing to end, and is not waited for.
        """
        with self._lock:
            there = [lane for lane in self._lanes if lane.state is LaneState.UP]
            away = [lane for lane in self._lanes if lane.state is LaneState.JOINING]
        for lane in away:
            lane.link.kill(restart=False)
        fan_out(f"{self._name}-close", [_bind_close(lane, timeout) for lane in there])

    def abandoned(self) -> list[Work]:
        """Kill what has not ended; the tasks that nobody will answer any more."""
        with self._lock:
            lanes = list(self._lanes)
            works = [work for lane in lanes for work in lane.tasks.values()]
            for lane in lanes:
                lane.tasks = {}
        for lane in lanes:
            if lane.state is not LaneState.GONE:
                lane.link.kill(restart=False)
        return works


def _bind(act: Callable[[Lane], None], lane: Lane) -> Callable[[], None]:
    return lambda: act(lane)


def _bind_abort(act: Callable[[str, list[str]], None], url: str, rids: list[str]) -> Callable[[], None]:
    return lambda: act(url, rids)


def _bind_jobs(lane: Lane, jobs: list[int], timeout: float) -> Callable[[], None]:
    return lambda: lane.link.abort(jobs, timeout)


def _bind_close(lane: Lane, timeout: float) -> Callable[[], None]:
    return lambda: lane.link.close(timeout)
