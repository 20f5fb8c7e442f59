"""The core: the parts of one client, put together. Made by the first verb, and anew in a forked child."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutsync.audit import Audit, make_audit
from rolloutsync.batch import BatchRules, check_vocabulary, read_batch
from rolloutsync.clock import ActiveTime, Clock, Deadline
from rolloutsync.controls import Controls
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.dump import Dump, make_dump
from rolloutsync.engine import Engine
from rolloutsync.errors import ClientClosedError
from rolloutsync.fleet import Fleet
from rolloutsync.health import Watcher
from rolloutsync.idle import Drainer
from rolloutsync.jobs import Job, SampleFuture
from rolloutsync.ledger import Ledger
from rolloutsync.order import Group, Order, Stop
from rolloutsync.retry import Judge
from rolloutsync.rollout import Rollout
from rolloutsync.sample import Sample
from rolloutsync.slot import LARGEST_LIMIT
from rolloutsync.stats import EngineStats, Stats
from rolloutsync.threads import start_thread
from rolloutsync.transport import Transport
from rolloutsync.workers import Workers

if TYPE_CHECKING:
    import requests

    from rolloutsync.config import ClientConfig
    from rolloutsync.sample import Prompt

log = logging.getLogger("rolloutsync")
_names = itertools.count()
_ABORT_ON_CLOSE_S = 1.0
_CANCEL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of one call that makes samples, checked.

    Attributes:
        n: Samples of each prompt.
        timeout: Of the whole call, in seconds of active time; None for no limit of its own.
    """

    items: list[Prompt | Sample]
    n: int
    timeout: float | None
    on_error: str
    progress: bool | None


class Core:
    """All running parts of one client. Thread-safe."""

    def __init__(
        self, urls: list[str], config: ClientConfig, session: requests.Session | None, clock: Clock | None = None
    ) -> None:
        self.clock = clock or Clock()
        self.name = f"rolloutsync-{next(_names)}"
        self._config = config
        self.dialect = SGLangDialect()
        self.transport = Transport(
            clock=self.clock,
            timeouts=config.timeouts,
            pool_size=config.engine_concurrency or LARGEST_LIMIT,
            budget_bytes=config.body_budget_bytes,
            session=session,
            name=self.name,
        )
        self.fleet = Fleet(
            self.clock,
            ActiveTime(self.clock),
            engine_wait_s=config.timeouts.engine_wait_s,
            concurrency=config.engine_concurrency,
            on_trouble=lambda: self.watcher.notice(),  # noqa: PLW0108 - the watcher is made below
            on_busy=lambda engine: self.watcher.watch(engine),  # noqa: PLW0108
        )
        self.watcher = Watcher(self.fleet, self.clock, self.name, config.timeouts)
        self.controls = Controls(self.fleet, self.name)
        self.ledger = Ledger()
        self.workers = self._make_workers()
        self.drainer = Drainer(self.fleet, self.clock, self.name, self.workers.drop)
        self._jobs = itertools.count()
        self._lock = threading.Lock()  # guards: _closed
        self._closed = False
        for url in urls:
            self.add(url)

    def _make_workers(self) -> Workers:
        policy = self._config.retry
        judge = Judge(policy, self.clock, random.Random())  # noqa: S311 - jitter, not a secret
        rollout = Rollout(self.fleet, judge, self.clock, policy=policy, timeouts=self._config.timeouts)
        return Workers(rollout, capacity=self.fleet.capacity, ledger=self.ledger, clock=self.clock, name=self.name)

    # --- engines ---

    def add(self, url: str) -> bool:
        """Make ``url`` a member; it is asked what it is by the next verb. False if it is one already."""
        return self.fleet.add(Engine(url, self.transport, self.dialect, self._config, self.clock))

    def ready(self, limit_s: float | None = None) -> None:
        """Block until the engines are known, as far as they answer; see ``Watcher.learn_new``."""
        self.check_open()
        self.watcher.learn_new(limit_s)

    def check_open(self) -> None:
        """Raise ClientClosedError if it is closed."""
        with self._lock:
            if self._closed:
                raise ClientClosedError("the client is closed")

    def vocab_size(self) -> int | None:
        """The smallest known vocabulary of the engines."""
        sizes = [engine.facts.vocab_size for engine in self.fleet.engines()]
        return min((size for size in sizes if size is not None), default=None)

    # --- making samples ---

    def read(self, batch: Any, rules: BatchRules) -> list[Prompt | Sample]:
        """The items of a batch, checked; asks new engines what they are, for the vocabulary."""
        self.check_open()
        items = read_batch(batch, rules)
        if not all(isinstance(item, Sample) for item in items):
            self.ready()
            check_vocabulary(items, self.vocab_size())
        return items

    def start(self, request: Request) -> Job:
        """Admit a job's orders and return it at once."""
        number, stop = next(self._jobs), Stop()
        job = Job(
            [item if isinstance(item, Sample) else None for item in request.items for _ in range(request.n)],
            n=request.n,
            on_error=request.on_error,
            progress=request.progress,
            clock=self.clock,
            stop=stop,
            abort=lambda timeout: self._abort_job(number, timeout),
        )
        orders = self._orders(request, number, stop)
        if orders:
            self.workers.admit(orders, job.deliver)
        return job

    def _orders(self, request: Request, job: int, stop: Stop) -> list[Order]:
        deadline, now = Deadline.after(self.fleet.active, request.timeout), self.clock.monotonic()
        active = self.fleet.active.monotonic()
        orders: list[Order] = []
        for index, prompt in enumerate(request.items):
            if isinstance(prompt, Sample):
                continue
            group, priority = Group(request.n), int(prompt.fields.get("priority", 0))
            orders += [
                Order(
                    prompt=prompt,
                    index=index,
                    member=member,
                    group=group,
                    job=job,
                    deadline=deadline,
                    admitted_at=now,
                    admitted_active=active,
                    priority=priority,
                    stops=(stop,),
                )
                for member in range(request.n)
            ]
        return orders

    def submit(self, request: Request) -> SampleFuture:
        """Admit a single order; its future."""
        stop, number = Stop(), next(self._jobs)
        future = SampleFuture(stop, lambda: self._abort_later(number))
        item = request.items[0]
        if isinstance(item, Sample):
            future.set_result(item)
            return future
        future.set_running_or_notify_cancel()
        self.workers.admit(self._orders(request, number, stop), lambda _, sample: future.set_result(sample))
        return future

    def _abort_job(self, job: int, timeout: float) -> None:
        self.workers.drop(job)
        self.fleet.wake()
        self.drainer.abort_own(timeout, of=lambda order: order.job == job)

    def _abort_later(self, job: int) -> None:
        """Abort from a thread of its own: ``Future.cancel`` must not block."""
        try:
            start_thread(f"{self.name}-cancel", lambda: self._abort_job(job, _CANCEL_S))
        except RuntimeError:
            self._abort_job(job, _CANCEL_S)

    # --- counts ---

    def stats(self) -> Stats:
        """Counts so far."""
        counts, totals = self.ledger.snapshot(), self.fleet.totals()
        return Stats(
            admitted=counts["admitted"],
            open=counts["open"],
            waiting=counts["waiting"],
            completed=counts["COMPLETED"],
            truncated=counts["TRUNCATED"],
            aborted=counts["ABORTED"],
            failed=counts["FAILED"],
            tokens=counts["tokens"],
            retries=counts["retries"],
            gate=self.fleet.gate.value,
            engines={url: EngineStats(requests=r, retries=a, tokens=t) for url, (r, a, t) in totals.items()},
        )

    def audit(self) -> Audit:
        """The books."""
        return make_audit(self.ledger, self.fleet, self.clock)

    def dump(self) -> Dump:
        """Who waits for what."""
        return make_dump(self.name, self.fleet.gate.value, self.fleet.statuses(), self.audit())

    # --- the end ---

    def close(self, timeout: float) -> list[str]:
        """End everything within about ``timeout`` seconds; the names of threads that did not end. Idempotent."""
        with self._lock:
            if self._closed:
                return []
            self._closed = True
        deadline = Deadline.after(self.clock, timeout)
        self.fleet.close()
        self.workers.close()
        if self.fleet.leases():
            self.drainer.abort_own(deadline.within(_ABORT_ON_CLOSE_S), of=lambda _: True)
        left = self.transport.close(deadline.within(timeout))
        left += self.workers.join(deadline)
        left += self.watcher.close(deadline.within(timeout))
        if left:
            log.warning("%s closed, but these threads have not ended yet: %s", self.name, ", ".join(left))
        return left

    def abandon(self) -> None:
        """In a forked child: let go of the parent's sockets without touching its connections."""
        self.transport.abandon()
