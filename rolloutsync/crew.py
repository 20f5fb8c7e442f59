"""The crew: gives each order of a fleet to one of its actors, takes the samples back, loses none when an actor dies."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutsync.actors import STACK_BYTES, Actors
from rolloutsync.admission import Admission
from rolloutsync.clock import Deadline
from rolloutsync.errors import ClientClosedError, DeadlineExceededError, EngineUnavailableError, RolloutError
from rolloutsync.gate import GateMode
from rolloutsync.lane import Lane, Work, choose_lane
from rolloutsync.order import Doing
from rolloutsync.remote import LinkLost, Task, slim_order, whole_sample
from rolloutsync.sample import Status
from rolloutsync.threads import start_thread
from rolloutsync.workers import hand_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.config import RetryPolicy
    from rolloutsync.fleet import Fleet
    from rolloutsync.ledger import Ledger
    from rolloutsync.order import Order
    from rolloutsync.remote import Report
    from rolloutsync.sample import Sample

    Deliver = Callable[[Order, Sample], None]
    Parcels = dict[tuple[Lane, str], list[Task]]  # by lane and its incarnation

_AT_ONCE = 256  # tasks in one message
_LOOK_S = 1.0
_ORDERLY = 0.5  # of the time for an end in order; then actors are killed, which takes time too
_LAST_NEWS_S = 0.5  # for threads to read what actors have said at their end
_SHY_S = 1.0  # whoever is lost is found out by then


class Crew(Actors):
    """Takes the place of a client's own threads: orders go to actors. Thread-safe.

    Args:
        fleet: Of the driver: the gate, and the engines, to which it speaks for control alone.
        ledger: Where each sample is accounted for.
        clock: Time.
        policy: Its ``max_attempts`` also say how many actors may die with a sample.
        engine_wait_s: How long an order waits while no actor has a live engine.
        actor_wait_s: How long an actor may be away before it is given up, and its engines are given to others.
        shared: All actors use all engines.
        name: Of the fleet, for thread names.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        clock: Clock,
        *,
        policy: RetryPolicy,
        engine_wait_s: float,
        actor_wait_s: float,
        shared: bool,
        name: str,
    ) -> None:
        super().__init__(fleet, clock, actor_wait_s=actor_wait_s, shared=shared, name=name)
        self._ledger = ledger
        self._policy = policy
        self._engine_wait_s = engine_wait_s
        self._keys = itertools.count()
        # Guarded by _lock too:
        self._waiting: Admission[Work] = Admission()
        self._dry_since: float | None = None  # active time since which no lane takes anything
        self._looked_at = 0.0  # clock seconds, for those whose time is up
        self._dispatcher: threading.Thread | None = None

    # --- orders in ---

    def admit(self, orders: list[Order], deliver: Deliver) -> None:
        """Take orders on: each will be delivered exactly once, from another thread. Does not block.

        Raises:
            ClientClosedError: Closed; nothing was taken.
            RuntimeError: No thread could be started; nothing was taken.
        """
        with self._lock:
            if self._closed:
                raise ClientClosedError("the fleet is closed")
            if self._dispatcher is None:
                self._dispatcher = start_thread(f"{self._name}-dispatch", self._dispatch, stack_bytes=STACK_BYTES)
            self._ledger.admit(orders)
        self._put([Work(order, deliver) for order in orders])

    def lend(self, order: Order) -> Sample:
        """Make one sample and block until it has ended.

        Raises:
            ClientClosedError: Closed; nothing was done.
        """
        ended = threading.Event()
        made: list[Sample] = []

        def deliver(_: Order, sample: Sample) -> None:
            made.append(sample)
            ended.set()

        self.admit([order], deliver)
        ended.wait()
        return made[0]

    def grow(self) -> None:
        """The gate has opened, or there may be more room than before."""
        with self._lock:
            self._changed.notify_all()

    def _put(self, works: list[Work], *, first: bool = False) -> None:
        """Let them wait; what is called off ends at once.

        Judged one by one: 1. the gate is closed here, 2. it opens, others are admitted, 3. all that waits is dropped
        would drop those others.
        """
        lines: dict[tuple[int, int], list[Work]] = defaultdict(list)
        off: list[Work] = []
        with self._lock:
            for work in works:
                called_off = self._closed or self._fleet.calls_off(work.order)
                (off if called_off else lines[work.order.job, work.order.priority]).append(work)
            for (job, priority), line in lines.items():
                self._waiting.put(line, job=job, priority=priority, first=first)
            self._changed.notify_all()
        for work in off:
            self._end(work, work.order.blank())

    def _put_back(self, works: list[Work]) -> None:
        """Let them wait before all else of their jobs, in their old order."""
        for work in works:
            work.order.life.now(Doing.QUEUED, self._clock.monotonic())
        self._put(works, first=True)

    def _again(self, works: list[Work], reason: str, lane: Lane, incarnation: str | None) -> None:
        """Put back what an actor was lost with, unless that has been often enough. Each loss counts once."""
        back: list[Work] = []
        for work in works:
            work.deaths.add(incarnation or "")
            if len(work.deaths) < self._policy.max_attempts or self._fleet.calls_off(work.order):
                back.append(work)
                continue
            words = f"{len(work.deaths)} actors were lost with this sample, the last {lane.name}: {reason}"
            self._fail(work, RolloutError(words, engine=work.order.life.engine, rid=work.order.life.rid))
        self._put_back(back)

    # --- tasks out ---

    def _dispatch(self) -> None:
        """The dispatcher's life: whenever something waits and somebody has room, hand over what fits."""
        while not self.is_closed:
            with self._lock:
                self._calm_locked()
                if not (self._closed or self._may_dispatch_locked()):
                    self._clock.wait(self._changed, _LOOK_S if self._waiting else None)
                dry = self._waiting.take() if self._is_dry_locked() else []
                late = self._late_locked()
                parcels, off = self._pack_locked() if self._may_dispatch_locked() else ({}, [])
            for work in dry:
                self._fail(work, self._unavailable())
            for work in late:
                self._fail(work, DeadlineExceededError(f"the sample's deadline came: {self._actors()}"))
            for work in off:
                self._end(work, work.order.blank())
            for (lane, incarnation), tasks in parcels.items():
                self._hand_over(lane, incarnation, tasks)

    def _may_dispatch_locked(self) -> bool:
        return bool(self._waiting) and self._fleet.gate is GateMode.OPEN and any(lane.free > 0 for lane in self._lanes)

    def _calm_locked(self) -> None:
        now = self._clock.monotonic()
        for lane in self._lanes:
            if lane.shy_until is not None and now >= lane.shy_until:
                lane.shy_until = None

    def _is_dry_locked(self) -> bool:
        """Whether nobody has had a live engine for too long, in active time: it stands still while the gate is held.

        An actor that has never been there yet may have one; how long its start may take is a matter of its own.
        """
        if not self._waiting or any(lane.room > 0 or lane.starting for lane in self._lanes):
            self._dry_since = None
            return False
        now = self._fleet.active.monotonic()
        self._dry_since = now if self._dry_since is None else self._dry_since
        return now - self._dry_since >= self._engine_wait_s

    def _late_locked(self) -> list[Work]:
        """Once a second, while nobody has a live engine: whose time is up. Elsewhere the actors see to that."""
        now = self._clock.monotonic()
        if now < self._looked_at + _LOOK_S or any(lane.room > 0 for lane in self._lanes):
            return []
        self._looked_at = now
        late: list[Work] = []
        for work in self._waiting.take():
            if work.order.deadline.expired:
                late.append(work)
            else:
                self._waiting.put([work], job=work.order.job, priority=work.order.priority)
        return late

    def _unavailable(self) -> EngineUnavailableError:
        words = f"no actor with a live engine within {self._engine_wait_s:g} s: {self._actors()}"
        return EngineUnavailableError(f"{words}; {self._fleet.unavailable().message}")

    def _actors(self) -> str:
        return "; ".join(self.lanes) or "the fleet has no actors"

    def _pack_locked(self) -> tuple[Parcels, list[Work]]:
        """What each actor is given now, and what is called off."""
        parcels: Parcels = defaultdict(list)
        off: list[Work] = []
        for _ in range(_AT_ONCE):
            if not self._waiting:
                break
            work = self._waiting.pop()
            if self._fleet.calls_off(work.order):
                off.append(work)
                continue
            lane = choose_lane(self._lanes, work.order.group)
            if lane is None or lane.incarnation is None:
                self._waiting.put([work], job=work.order.job, priority=work.order.priority, first=True)
                break
            parcels[lane, lane.incarnation].append(self._assign_locked(lane, work))
        return parcels, off

    def _assign_locked(self, lane: Lane, work: Work) -> Task:
        key, life = next(self._keys), work.order.life
        lane.tasks[key], work.cuts = work, self._fleet.cuts
        self._ledger.take(work.order)
        life.rid, life.engine = None, None
        life.now(Doing.ACTOR, self._clock.monotonic())
        return _task(key, work.order)

    def _hand_over(self, lane: Lane, incarnation: str, tasks: list[Task]) -> None:
        try:
            lane.link.take(tasks, incarnation, lambda error: self._not_taken(lane, incarnation, tasks, error))
        except Exception as error:  # noqa: BLE001 - whatever a user's objects raise when they are pickled
            self._not_taken(lane, incarnation, tasks, error)

    def _not_taken(self, lane: Lane, incarnation: str, tasks: list[Task], error: Exception) -> None:
        """None of them did arrive: the actor is lost, or one of them does not pickle. Which one, they tell alone."""
        lost = isinstance(error, LinkLost)
        if not lost and len(tasks) > 1:
            for task in tasks:
                self._hand_over(lane, incarnation, [task])
            return
        with self._lock:
            works = [lane.tasks.pop(task.key) for task in tasks if task.key in lane.tasks]
            if lost and lane.incarnation == incarnation:
                lane.shy_until = self._clock.monotonic() + _SHY_S
        if lost:
            self._again(works, str(error), lane, incarnation)
            return
        for work in works:
            self._fail(work, RolloutError(f"could not be sent to actor {lane.name}: {type(error).__name__}: {error}"))

    # --- samples back ---

    def _heard(self, lane: Lane, report: Report) -> None:
        now = self._clock.monotonic()
        with self._lock:
            for placed in report.placed:
                if placed.key in lane.tasks:
                    life = lane.tasks[placed.key].order.life
                    life.rid, life.engine, life.attempts = placed.rid, placed.engine, placed.attempts
                    life.now(Doing.ENGINE, now)
            for key, engines in report.died_on.items():
                if key in lane.tasks:
                    lane.tasks[key].order.life.died_on = engines
            found = [(lane.tasks.pop(key), sample) for key, sample in report.ended if key in lane.tasks]
            lane.shy_until = None
            lane.room, lane.heard, lane.reason = report.room, max(lane.heard, report.number), report.why
            self._changed.notify_all()
        back: list[Work] = []
        for work, sample in found:
            if self._bounces(work, sample):
                back.append(work)
            else:
                self._end(work, whole_sample(sample, work.order))
        self._put_back(back)

    def _bounces(self, work: Work, sample: Sample) -> bool:
        """Whether it must be made anew: the actor had no live engine for it, which another may have, or itself soon.

        Or another actor that shares its engine has aborted all there, to prove it idle before it takes it back.
        """
        unasked = self._shared and sample.status is Status.ABORTED and work.cuts == self._fleet.cuts
        again = isinstance(sample.error, EngineUnavailableError) or (unasked and not work.order.stopped)
        work.bounces += again
        return again and work.bounces < self._policy.max_attempts

    def _end(self, work: Work, sample: Sample) -> None:
        order = work.order
        if sample.engine is not None:
            tokens, attempts = order.news(sample)
            self._fleet.count(sample.engine, requests=attempts, tokens=tokens)
        hand_over(self._ledger, order, work.deliver, sample)

    def _fail(self, work: Work, error: RolloutError) -> None:
        self._end(work, replace(work.order.blank(), status=Status.FAILED, error=error))

    # --- the end ---

    def drop(self, job: int | None = None) -> None:
        """Deliver what no actor has yet (of one job, or of all) ABORTED and unsent, from this thread."""
        with self._lock:
            dropped = self._waiting.take(job)
        for work in dropped:
            self._end(work, work.order.blank())

    def close(self) -> None:
        """Take nothing more; what waits is delivered ABORTED. What actors have is ended by ``join``."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.drop()

    def join(self, deadline: Deadline) -> list[str]:
        """End the actors and then the threads; the names of those that did not end. No sample stays open."""
        with self._lock:
            threads = [thread for thread in (self._dispatcher, *(lane.thread for lane in self._lanes)) if thread]
        self.dismiss(_ORDERLY * (deadline.remaining() or 0.0))
        self._await(threads, Deadline.after(self._clock, deadline.within(_LAST_NEWS_S)))
        for work in self.abandoned():
            self._end(work, work.order.blank())
        self._await(threads, deadline)
        return [thread.name for thread in threads if thread.is_alive()]

    def _await(self, threads: list[threading.Thread], deadline: Deadline) -> None:
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())


def _task(key: int, order: Order) -> Task:
    prompt, base = slim_order(order)
    return Task(
        key=key,
        prompt=prompt,
        index=order.index,
        member=order.member,
        group=order.group.number,
        size=order.group.size,
        sticky=order.group.sticky,
        job=order.job,
        priority=order.priority,
        closings=order.closings,
        seconds=order.deadline.remaining(),
        base=base,
        died_on=order.life.died_on,
    )
