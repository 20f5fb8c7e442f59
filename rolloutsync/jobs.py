"""Jobs: the samples of one call, as they come, in groups, or all in order."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rolloutsync.errors import BatchError, ForkedError, RolloutError, shown
from rolloutsync.progress import LOOK_S, Progress
from rolloutsync.sample import Sample, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from rolloutsync.clock import Clock
    from rolloutsync.order import Order, Stop

log = logging.getLogger("rolloutsync.jobs")
_ABORT_S = 30.0
_LEAVING_S = 0.5
ON_ERROR = ("auto", "return", "raise")


def check_on_error(on_error: Any) -> None:
    """Refuse an ``on_error`` that does not exist."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error must be one of {ON_ERROR}, got {shown(on_error)}")


class Job:
    """The samples of one ``start``. Thread-safe; made by the client only.

    Iterate over it for samples as they finish (each iteration starts from the first that finished); ``groups()`` gives
    whole groups, ``result()`` everything in order. As a context manager, leaving it before the end aborts what is left
    of it, its own requests alone, and keeps the partials.
    """

    def __init__(
        self,
        slots: list[Sample | None],
        *,
        n: int,
        on_error: str,
        progress: bool | None,
        clock: Clock,
        stop: Stop,
        abort: Callable[[float], object],
    ) -> None:
        self._slots = slots
        self._n = n
        self._on_error = on_error
        self._progress = progress
        self._clock = clock
        self._stop = stop
        self._abort = abort
        self._pid = os.getpid()
        # _lock guards: _slots, _finished, _tokens, _statuses, _missing, _whole, _iterators. Never held across I/O.
        # Two conditions on it, so that who waits for everything is not woken for each sample.
        self._lock = threading.RLock()
        self._one_more = threading.Condition(self._lock)
        self._all = threading.Condition(self._lock)
        self._iterators = 0  # threads that wait for one more
        self._finished = [place for place, sample in enumerate(slots) if sample is not None]  # places, in that order
        self._statuses: Counter[Status] = Counter(sample.status for sample in slots if sample is not None)
        self._tokens = 0
        self._missing = [n] * (len(slots) // n)  # of each group
        self._whole = 0  # groups
        self._bar = Progress(len(slots), progress, clock)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"<Job: {len(self._finished)} of {len(self._slots)} samples>"

    def deliver(self, order: Order, sample: Sample) -> None:
        """Called by another thread, once for each order. Does not block."""
        place = order.index * self._n + order.member
        with self._lock:
            self._slots[place] = sample
            self._finished.append(place)
            self._statuses[sample.status] += 1
            self._missing[order.index] -= 1
            self._whole += self._missing[order.index] == 0
            self._tokens += order.news(sample)[0]
            if self._iterators:
                self._one_more.notify_all()
            if len(self._finished) == len(self._slots):
                self._all.notify_all()

    # --- waiting ---

    @property
    def done(self) -> bool:
        """Whether every sample has ended. Does not block."""
        with self._lock:
            return len(self._finished) == len(self._slots)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until every sample has ended, for at most ``timeout`` seconds; whether they have."""
        until = None if timeout is None else self._clock.monotonic() + timeout
        self._bar.begin()
        done = False
        try:
            done = self._wait(until)
        finally:
            if done or timeout is None:  # else somebody may wait on
                self._bar.close()
        return done

    def _wait(self, until: float | None) -> bool:
        while True:
            with self._lock:
                done = len(self._finished) == len(self._slots)
                if not done:
                    left = None if until is None else until - self._clock.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self._wait_locked(self._all, min(LOOK_S, left or LOOK_S) if self._bar.wanted else left)
            self._show()
            if done:
                return True

    def _wait_locked(self, condition: threading.Condition, seconds: float | None) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this job belongs to the parent process: its threads do not exist in a forked child")
        self._clock.wait(condition, seconds)

    def _show(self) -> None:
        with self._lock:
            done, tokens = len(self._finished), self._tokens
            aborted, failed = self._statuses[Status.ABORTED], self._statuses[Status.FAILED]
            groups = {"groups": f"{self._whole}/{len(self._missing)}"} if self._n > 1 else {}
        rest = {**groups, "in_flight": len(self._slots) - done, "aborted": aborted, "failed": failed}
        self._bar.show(done, tokens, rest)

    def __iter__(self) -> Iterator[Sample]:
        """Samples as they finish; blocks for each next one."""
        for place in self._places():
            yield self._at(place, place + 1)[0]

    def _places(self) -> Iterator[int]:
        for number in range(len(self._slots)):
            with self._lock:
                self._iterators += 1
                try:
                    while len(self._finished) <= number:
                        self._wait_locked(self._one_more, None)
                finally:
                    self._iterators -= 1
                place = self._finished[number]
            if self._progress:  # a bar that nobody asked for belongs to blocking calls
                self._show()
            yield place
        self._bar.close()

    def _at(self, start: int, stop: int) -> list[Sample]:
        with self._lock:
            return [sample for sample in self._slots[start:stop] if sample is not None]

    def groups(self) -> Iterator[list[Sample]]:
        """Whole groups (the n samples of one prompt, by member) as they become complete; blocks for each next one."""
        missing = dict.fromkeys(range(len(self._slots) // self._n), self._n)
        for place in self._places():
            index = place // self._n
            missing[index] -= 1
            if missing[index] == 0:
                yield self._at(index * self._n, (index + 1) * self._n)

    def result(self) -> list[Sample]:
        """Block until every sample has ended; all of them in input order, prompt-major.

        Raises:
            BatchError: As ``on_error`` says; ``.samples`` is the complete list.
        """
        self.wait()
        samples = self._at(0, len(self._slots))
        judge_batch(samples, self._on_error)
        return samples

    # --- calling off ---

    def abort(self, timeout: float = _ABORT_S) -> list[Sample]:
        """Abort what is left of this job and block until every sample has ended.

        Touches this job's own requests alone. Requests that are not answered within ``timeout`` seconds have their
        sockets shut, on which engines abort them.

        Returns:
            The partials: see ``partials``.
        """
        self._stop.set()
        self._abort(timeout)
        self.wait()
        return self.partials

    @property
    def partials(self) -> list[Sample]:
        """The samples that were cut short, so far, in input order. Does not block."""
        return [sample for sample in self._at(0, len(self._slots)) if sample.status is Status.ABORTED]

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.done:
            return
        if kind is None or issubclass(kind, Exception):
            self.abort(_ABORT_S)
            return
        self._stop.set()  # Ctrl-C: the process wants to end, so nothing is waited for without a limit
        self._abort(_LEAVING_S)
        self.wait(_LEAVING_S)


class SampleFuture(Future[Sample]):
    """The future of one ``submit``. ``cancel()`` aborts the sample: its result is then an ABORTED ``Sample``."""

    def __init__(self, stop: Stop, abort: Callable[[], object]) -> None:
        super().__init__()
        self._stop_signal = stop
        self._send_abort = abort

    def cancel(self) -> bool:
        """Abort the sample, without waiting for it; False if it has ended already.

        Unlike other futures this one is not CANCELLED afterwards: an abort is a result, so ``result()`` returns the
        partial as soon as the engine has answered.
        """
        if self.done():
            return False
        self._stop_signal.set()
        self._send_abort()
        return True


def judge_batch(samples: list[Sample], on_error: str) -> None:
    """Warn of failed samples, or raise, as ``on_error`` says."""
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    if not failed or on_error == "return":
        return
    counts = Counter(sample.status.value for sample in samples)
    words = f"{len(failed)} of {len(samples)} samples failed"
    first = failed[0].error
    if on_error == "raise" or len(failed) == len(samples):
        raise batch_error(f"{words}; the first: {first}", samples, counts) from first
    log.warning("%s; the first: %s", words, first)


def batch_error(message: str, samples: list[Sample], counts: Counter[str]) -> BatchError:
    """A ``BatchError`` with its complete list."""
    first: RolloutError | None = next((sample.error for sample in samples if sample.error is not None), None)
    engine = first.engine if first is not None else None
    return BatchError(message, engine=engine, samples=samples, counts=dict(counts))
