"""The threads: a pool that grows as orders wait, runs rollouts, and hands each sample over exactly once."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rolloutsync.admission import Admission
from rolloutsync.clock import Deadline
from rolloutsync.errors import ClientClosedError, RolloutError
from rolloutsync.order import Doing
from rolloutsync.sample import Sample, Status
from rolloutsync.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.journey import Journey
    from rolloutsync.ledger import Ledger
    from rolloutsync.order import Order
    from rolloutsync.rollout import Rollout

    Deliver = Callable[[Order, Sample], None]

R = TypeVar("R")
log = logging.getLogger("rolloutsync.workers")
_IDLE_EXIT_S = 10.0
_LOOK = 64  # requests that the usher's thread sends from one look at the capacity to the next
_AT_ONCE = 2  # threads that are started together; each starts more, or wakes one, before it blocks


class _Passage:
    """An order on its way to its delivery. One thread at a time has it: a worker, or the usher's."""

    __slots__ = ("deliver", "journey", "order", "workers")

    def __init__(self, workers: Workers, order: Order, deliver: Deliver) -> None:
        self.workers = workers
        self.order = order
        self.deliver = deliver
        self.journey: Journey | None = None  # since a thread has taken the order

    @property
    def has_place(self) -> bool:
        """Whether it has a place at an engine."""
        return self.journey is not None and self.journey.lease is not None

    def landed(self, whole: bool) -> Callable[[], None] | None:
        """The usher has read its answer, or what it could."""
        return self.workers.land(self, whole)


class Workers:
    """A lazily grown pool of daemon threads. Thread-safe.

    Args:
        rollout: Makes the samples.
        capacity: How many requests may be under way now.
        ledger: Where each sample is accounted for.
        clock: Time.
        name: Of the client, for thread names.
    """

    def __init__(
        self, rollout: Rollout, *, capacity: Callable[[], int], ledger: Ledger, clock: Clock, name: str
    ) -> None:
        self._rollout = rollout
        self._capacity = capacity
        self._ledger = ledger
        self._clock = clock
        self._name = name
        self._numbers = itertools.count()
        # _lock guards all that follows. Never held across a rollout; across a start only of the first thread.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: Admission[_Passage] = Admission()
        self._stranded: deque[_Passage] = deque()  # whose answers have come, and that need a thread for what is next
        self._under_way = 0  # passages that are not waiting and not delivered
        self._room = 1  # for those, as of the last look; one by one they find out that there is no engine
        self._threads: set[threading.Thread] = set()  # those that run, for join
        self._size = 0  # threads that run or are being started
        self._starting = 0  # of these, the ones that have not come for their first order yet
        self._idle = 0
        self._scarce = False  # the system gave no thread when one was last asked for
        self._tell_scarce = True  # once for each admission
        self._closed = False
        self._gone_on = 0  # of the usher's thread alone

    def admit(self, orders: list[Order], deliver: Deliver) -> None:
        """Take orders on: each will be delivered exactly once, from another thread. Does not block.

        Raises:
            ClientClosedError: Closed; nothing was taken.
            RuntimeError: Not even one thread could be started; nothing was taken.
        """
        lines: dict[tuple[int, int], list[_Passage]] = defaultdict(list)
        for order in orders:
            lines[order.job, order.priority].append(_Passage(self, order, deliver))
        with self._lock:
            if self._closed:
                raise ClientClosedError("the client is closed")
            if not self._size:
                self._threads.add(self._start_one())
                self._size += 1
                self._starting += 1
            self._ledger.admit(orders)
            self._tell_scarce = True
            for (job, priority), line in lines.items():
                self._waiting.put(line, job=job, priority=priority)
            self._changed.notify()
        self.grow()

    def lend(self, order: Order) -> Sample:
        """Make a sample in the caller's own thread, which waits for it anyway; accounted for like all others. Blocks.

        Raises:
            ClientClosedError: Closed; nothing was done.
        """
        with self._lock:
            if self._closed:
                raise ClientClosedError("the client is closed")
        self._ledger.admit([order])
        self._ledger.take(order)
        sample = self._guarded(order, lambda: self._rollout.run(order))
        self._ledger.end(order, sample)
        return sample

    def grow(self) -> None:
        """Start threads, as far as there is work for them and capacity; also when an engine has come.

        A few at a time, and none while there are idle ones, of which one was woken: whoever is about to block wakes or
        starts more (see ``_relieve``), and who need not block goes on by itself. What is under way gets a thread in
        any case, if the system has any: others may wait for its place.
        """
        capacity = self._capacity()
        with self._lock:
            before, self._room = self._room, max(1, capacity)
            if self._room > before and self._waiting:
                self._changed.notify()
            missing = 0 if self._idle else min(self._wanted_locked(), _AT_ONCE) - self._starting
            missing = max(0, min(missing, max(capacity, self._under_way) - self._size))
            self._size += missing
            self._starting += missing
        self._start(missing)

    def _wanted_locked(self) -> int:
        """How many passages want a thread now."""
        waiting = min(len(self._waiting), self._room - self._under_way)
        return len(self._stranded) + max(0, 0 if self._closed else waiting)

    def _start(self, count: int) -> None:
        """Start ``count`` threads, or as many as the system gives, or as are of use: those that run may be quicker."""
        started = 0
        try:
            while started < count and self._of_use() and (thread := self._try_start()) is not None:
                with self._lock:
                    self._threads.add(thread)
                started += 1
        finally:
            with self._lock:
                self._size -= count - started
                self._starting -= count - started

    def _try_start(self) -> threading.Thread | None:
        try:
            thread = self._start_one()
        except (RuntimeError, MemoryError) as error:
            with self._lock:
                tell, self._scarce, self._tell_scarce = self._tell_scarce, True, False
            if tell:
                words = "only %d worker threads (%s): raise RLIMIT_NPROC or pids.max"
                _say(words, len(self._threads), error, level=logging.WARNING)
            return None
        self._scarce = False
        return thread

    def _of_use(self) -> bool:
        with self._lock:
            return self._wanted_locked() > 0 and not self._idle

    def _start_one(self) -> threading.Thread:
        return start_thread(f"{self._name}-worker-{next(self._numbers)}", self._run)

    def _run(self) -> None:
        """A worker's life: take the next passage, go its way, deliver; leave after ten idle seconds."""
        with self._lock:
            self._starting -= 1
        while (passage := self._next()) is not None:
            self._work(passage)
            del passage  # while it waits, a thread must not keep a job and all its samples alive
            if self._scarce:
                self._grow_safely()  # there may be more by now

    def _next(self) -> _Passage | None:
        until: Deadline | None = None
        with self._lock:
            while (passage := self._pop_locked()) is None:
                until = until or Deadline.after(self._clock, _IDLE_EXIT_S)
                if self._leaves_locked(expired=until.expired):
                    self._threads.discard(threading.current_thread())
                    self._size -= 1
                    return None
                self._idle += 1
                try:
                    self._clock.wait(self._changed, until.remaining() or _IDLE_EXIT_S)
                finally:
                    self._idle -= 1
            return passage

    def _leaves_locked(self, *, expired: bool) -> bool:
        """One that does nothing stays while something is under way: the system may give no other when it is wanted."""
        if not self._idle and (self._under_way or (self._waiting and not self._closed)):
            return False
        return self._closed or expired

    def _pop_locked(self) -> _Passage | None:
        """What wants a thread: first what is under way already."""
        return self._stranded.popleft() if self._stranded else self._pop_waiting_locked()

    def _pop_waiting_locked(self) -> _Passage | None:
        if not self._waiting or self._under_way >= self._room:
            return None
        self._under_way += 1
        return self._waiting.pop()

    def _work(self, passage: _Passage) -> None:
        """Go a passage to its end, or until its request is the usher's, or others need this thread more."""
        if passage.journey is None and self._sets_out(passage, self._relieve):
            return
        self._relieve()
        sample = self._guarded(passage.order, lambda: self._rollout.travel(_journey_of(passage), self._give_way))
        if sample is not None:
            self._end(passage, sample)
            return
        with self._lock:
            self._stranded.append(passage)

    def _relieve(self) -> None:
        """This thread is about to block: whatever else wants a thread gets another."""
        with self._lock:
            if not self._wanted_locked():
                return
            if self._idle:
                self._changed.notify()
                return
        self._grow_safely()

    def _grow_safely(self) -> None:
        try:
            self.grow()
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: what it has in hand must go on
            _say("threads could not be started", error=error)

    def _give_way(self) -> bool:
        """Whether whoever waits for a place should leave its thread to one that has a place, and no thread."""
        return self._scarce and any(one.has_place for one in self._stranded.copy())

    def _sets_out(self, passage: _Passage, relieve: Callable[[], None] | None) -> bool:
        """The first step of a passage: its request, left to the usher where that can be. See ``Rollout.set_out``."""
        order = passage.order
        self._ledger.take(order)
        passage.journey = self._rollout.journey(order)
        if order.calls_back:
            return False
        try:
            sent = self._rollout.set_out(passage.journey, relieve)
            return sent and self._rollout.park(passage.journey, passage.landed)
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame; travel() meets it again
            _say("sample %d/%d: it could not set out", order.index, order.member, error=error)
            return False

    def _end(self, passage: _Passage, sample: Sample) -> None:
        try:
            hand_over(self._ledger, passage.order, passage.deliver, sample)
        finally:
            with self._lock:
                self._under_way -= 1
                if self._closed and not self._under_way:
                    self._changed.notify_all()

    def _guarded(self, order: Order, make: Callable[[], R]) -> R | Sample:
        try:
            return make()
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: a bug of ours must not lose the sample
            return _failed(order, error)

    # --- in the usher's thread: nothing here waits for an engine, or for another thread's request ---

    def land(self, passage: _Passage, whole: bool) -> Callable[[], None] | None:
        """The usher has read a passage's answer: deliver it, or find a thread. Returns what to do next."""
        sample: Sample | None = None
        if whole:
            sample = self._guarded(passage.order, lambda: self._rollout.land(_journey_of(passage)))
        if sample is None:
            self._strand(passage)
            return None
        self._end(passage, sample)
        return self._go_on

    def _go_on(self) -> None:
        """Send the request that has waited for the place that is free now."""
        self._gone_on += 1
        if self._gone_on % _LOOK == 0:
            self._grow_safely()  # there may be more places by now
        with self._lock:
            following = None if self._closed else self._pop_waiting_locked()
        if following is not None and not self._sets_out(following, None):
            self._strand(following)

    def _strand(self, passage: _Passage) -> None:
        """What it needs next may block, so a worker goes on with it; one that is there, or a new one."""
        passage.order.life.now(Doing.QUEUED, self._clock.monotonic())
        with self._lock:
            self._stranded.append(passage)
            self._changed.notify()
        self._grow_safely()

    def drop(self, job: int | None = None) -> None:
        """Deliver what no thread has taken yet (of one job, or of all) ABORTED and unsent, from this thread."""
        with self._lock:
            dropped = self._waiting.take(job)
        for one in dropped:
            hand_over(self._ledger, one.order, one.deliver, one.order.blank())

    def close(self) -> None:
        """Take nothing more; what waits is delivered ABORTED."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.drop()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the threads to end, also for those that they start to end what is under way; who did not end."""
        seen: set[threading.Thread] = set()
        while more := self._threads_but(seen):
            seen |= more
            for thread in more:
                thread.join(deadline.remaining())
        return [thread.name for thread in seen if thread.is_alive()]

    def _threads_but(self, some: set[threading.Thread]) -> set[threading.Thread]:
        with self._lock:
            return self._threads - some - {threading.current_thread()}


def _journey_of(passage: _Passage) -> Journey:
    if passage.journey is None:
        raise RuntimeError("the order has not set out")
    return passage.journey


def _failed(order: Order, error: Exception) -> Sample:
    _say("sample %d/%d: unexpected error", order.index, order.member, error=error)
    wrapped = RolloutError(f"internal error: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return replace(order.blank(), status=Status.FAILED, error=wrapped)


def _say(words: str, *args: object, error: Exception | None = None, level: int = logging.ERROR) -> None:
    with contextlib.suppress(Exception):  # a user's handler that fails must cost no sample
        log.log(level, words, *args, exc_info=error)


def hand_over(ledger: Ledger, order: Order, deliver: Deliver, sample: Sample) -> None:
    """Deliver a sample, unless its order had ended before."""
    if not ledger.end(order, sample):
        _say("sample %d/%d (%s) ended twice; the second is dropped", order.index, order.member, sample.rid)
        return
    try:
        deliver(order, sample)
    except Exception as error:  # noqa: BLE001 - the callback is ours, and one sample's must not end the thread
        _say("delivery of sample %d/%d failed", order.index, order.member, error=error)
