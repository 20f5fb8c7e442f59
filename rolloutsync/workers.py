"""The threads: a pool that grows as orders wait, runs rollouts, and hands each sample over exactly once."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutsync.admission import Admission
from rolloutsync.clock import Deadline
from rolloutsync.errors import ClientClosedError, RolloutError
from rolloutsync.sample import Sample, Status
from rolloutsync.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.ledger import Ledger
    from rolloutsync.order import Order
    from rolloutsync.rollout import Rollout

    Deliver = Callable[[Order, Sample], None]

log = logging.getLogger("rolloutsync.workers")
_IDLE_EXIT_S = 10.0
_WOKEN = 8


class Workers:
    """A lazily grown pool of daemon threads. Thread-safe.

    Args:
        rollout: Makes the samples.
        capacity: How many threads make sense now.
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
        self._waiting: Admission[tuple[Order, Deliver]] = Admission()
        self._threads: set[threading.Thread] = set()  # those that run, for join
        self._size = 0  # threads that run or are being started
        self._starting = 0  # of these, the ones that have not come for their first order yet
        self._idle = 0
        self._closed = False

    def admit(self, orders: list[Order], deliver: Deliver) -> None:
        """Take orders on: each will be delivered exactly once, from a worker thread. Does not block.

        Raises:
            ClientClosedError: Closed; nothing was taken.
            RuntimeError: Not even one thread could be started; nothing was taken.
        """
        lines: dict[tuple[int, int], list[tuple[Order, Deliver]]] = defaultdict(list)
        for order in orders:
            lines[order.job, order.priority].append((order, deliver))
        with self._lock:
            if self._closed:
                raise ClientClosedError("the client is closed")
            if not self._size:
                self._threads.add(self._start_one())
                self._size += 1
                self._starting += 1
            self._ledger.admit(orders)
            for (job, priority), line in lines.items():
                self._waiting.put(line, job=job, priority=priority)
            self._changed.notify(min(len(orders), _WOKEN))
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
        sample = self._make(order)
        self._ledger.end(order, sample)
        return sample

    def grow(self) -> None:
        """Start the threads that what waits and the present capacity call for; also when an engine has come.

        Each order that waits has a thread that is idle, or on its way to its first order, as far as there is capacity.
        """
        capacity = self._capacity()
        with self._lock:
            missing = min(len(self._waiting) - self._idle - self._starting, capacity - self._size)
            missing = 0 if self._closed else max(0, missing)
            self._size += missing
            self._starting += missing
        self._start(missing)

    def _start(self, count: int) -> None:
        """Start ``count`` threads, or as many as the system gives."""
        for started in range(count):
            try:
                thread = self._start_one()
            except RuntimeError as error:
                log.warning("only %d worker threads (%s): raise RLIMIT_NPROC or pids.max", len(self._threads), error)
                with self._lock:
                    self._size -= count - started
                    self._starting -= count - started
                return
            with self._lock:
                self._threads.add(thread)

    def _start_one(self) -> threading.Thread:
        return start_thread(f"{self._name}-worker-{next(self._numbers)}", self._run)

    def _run(self) -> None:
        """A worker's life: take the next order, make its sample, deliver it; leave after ten idle seconds."""
        with self._lock:
            self._starting -= 1
        while (work := self._next()) is not None:
            self._work(*work)
            del work  # while it waits, a thread must not keep a job and all its samples alive

    def _work(self, order: Order, deliver: Deliver) -> None:
        self._ledger.take(order)
        hand_over(self._ledger, order, deliver, self._make(order))

    def _next(self) -> tuple[Order, Deliver] | None:
        until: Deadline | None = None
        with self._lock:
            while not self._waiting:
                until = until or Deadline.after(self._clock, _IDLE_EXIT_S)
                if self._closed or until.expired:
                    self._threads.discard(threading.current_thread())
                    self._size -= 1
                    return None
                self._idle += 1
                try:
                    self._clock.wait(self._changed, until.remaining())
                finally:
                    self._idle -= 1
            work = self._waiting.pop()
            if self._waiting and self._idle:
                self._changed.notify()  # one wakes the next: thousands woken at once would crowd the interpreter
            return work

    def _make(self, order: Order) -> Sample:
        try:
            return self._rollout.run(order)
        except Exception as error:  # a thread's outermost frame: a bug of ours must not lose the sample
            log.exception("sample %d/%d: unexpected error", order.index, order.member)
            wrapped = RolloutError(f"internal error: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return replace(order.blank(), status=Status.FAILED, error=wrapped)

    def drop(self, job: int | None = None) -> None:
        """Deliver what no thread has taken yet (of one job, or of all) ABORTED and unsent, from this thread."""
        with self._lock:
            dropped = self._waiting.take(job)
        for order, deliver in dropped:
            hand_over(self._ledger, order, deliver, order.blank())

    def close(self) -> None:
        """Take nothing more; what waits is delivered ABORTED."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.drop()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the threads to end; the names of those that did not."""
        with self._lock:
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(deadline.remaining())
        return [thread.name for thread in threads if thread.is_alive()]


def hand_over(ledger: Ledger, order: Order, deliver: Deliver, sample: Sample) -> None:
    """Deliver a sample, unless its order had ended before."""
    if not ledger.end(order, sample):
        log.error("sample %d/%d (%s) ended twice; the second is dropped", order.index, order.member, sample.rid)
        return
    try:
        deliver(order, sample)
    except Exception:  # a thread's outermost frame: the callback is ours, and one sample's must not end the thread
        log.exception("delivery of sample %d/%d failed", order.index, order.member)
