"""The core: the parts of one client, put together. Made by the first verb, and anew in a forked child."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rolloutsync.audit import Audit, make_audit
from rolloutsync.batch import BatchRules, Item, check_vocabulary, overridden, read_batch
from rolloutsync.clock import ActiveTime, Clock, Deadline
from rolloutsync.collect import Collector, Means, Plan
from rolloutsync.collected import Collected
from rolloutsync.controls import Controls
from rolloutsync.dialects.common import Common
from rolloutsync.dialects.every import BY_NAME
from rolloutsync.dump import Dump, make_dump
from rolloutsync.engine import Engine
from rolloutsync.errors import ClientClosedError
from rolloutsync.fleet import Fleet
from rolloutsync.health import Watcher
from rolloutsync.idle import Drainer
from rolloutsync.jobs import Job, SampleFuture
from rolloutsync.ledger import Ledger
from rolloutsync.order import Group, Order, Stop, Wanted
from rolloutsync.quiet import Quiet
from rolloutsync.resume import Resumed
from rolloutsync.retry import Judge
from rolloutsync.rollout import Rollout
from rolloutsync.sample import Prompt, Sample
from rolloutsync.sessions import Sessions
from rolloutsync.slot import LARGEST_LIMIT
from rolloutsync.stats import EngineStats, Stats
from rolloutsync.threads import start_thread
from rolloutsync.transport import Transport
from rolloutsync.turn import Stage
from rolloutsync.weights import Weights
from rolloutsync.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import requests

    from rolloutsync.config import ClientConfig

log = logging.getLogger("rolloutsync")
F = TypeVar("F", bound=Fleet)
_names = itertools.count()
_ABORT_ON_CLOSE_S = 1.0
_CANCEL_S = 30.0
_FEWEST_EPISODES = 64
_MOST_EPISODES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of one call that makes samples, checked.

    Attributes:
        n: Samples of each prompt.
        timeout: Of the whole call, in seconds of active time; None for no limit of its own.
    """

    items: list[Item]
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
        self.vocabulary = Common()
        self.transport = Transport(
            clock=self.clock,
            timeouts=config.timeouts,
            pool_size=config.engine_concurrency or LARGEST_LIMIT,
            budget_bytes=config.body_budget_bytes,
            session=session,
            name=self.name,
        )
        self.fleet = self._make_fleet(Fleet)
        self.watcher = Watcher(self.fleet, self.clock, self.name, config.timeouts)
        self.controls = Controls(self.fleet, self.name)
        self.ledger = Ledger()
        self._sessions = Sessions()
        self.workers = self._make_workers()
        self.drainer = self._make_drainer()
        self.quiet = Quiet(self.fleet, self.drainer, self.clock, self.name)
        self.weights = Weights(self.fleet, self.quiet, self.transport, self.clock, self.name)
        self._jobs = itertools.count()
        self._lock = threading.Lock()  # guards: _closed, _warned
        self._closed = False
        self._warned = False  # of partials with penalties
        for url in urls:
            self.add(url)

    def _make_fleet(self, kind: Callable[..., F]) -> F:
        return kind(
            self.clock,
            ActiveTime(self.clock),
            engine_wait_s=self._config.timeouts.engine_wait_s,
            concurrency=self._config.engine_concurrency,
            on_trouble=lambda: self.watcher.notice(),  # noqa: PLW0108 - the watcher is made later
            on_busy=lambda engine: self.watcher.watch(engine),  # noqa: PLW0108
        )

    def _make_drainer(self) -> Drainer:
        return Drainer(self.fleet, self.clock, self.name, self.workers.drop)

    def _make_workers(self) -> Workers:
        policy = self._config.retry
        judge = Judge(policy, self.clock, random.Random())  # noqa: S311 - jitter, not a secret
        rollout = Rollout(self.fleet, judge, self.clock, policy=policy, timeouts=self._config.timeouts)
        return Workers(rollout, capacity=self.fleet.capacity, ledger=self.ledger, clock=self.clock, name=self.name)

    # --- engines ---

    def add(self, url: str) -> bool:
        """Make ``url`` a member; it is asked what it is by the next verb. False if it is one already."""
        return self.fleet.add(Engine(url, self.transport, BY_NAME.get(self._config.dialect), self._config, self.clock))

    def ready(self, limit_s: float | None = None) -> None:
        """Block until the engines are known, as far as they answer; see ``Watcher.learn_new``."""
        self.check_open()
        self.watcher.learn_new(limit_s)
        if (wrong := self.watcher.wrong_server()) is not None:
            raise wrong

    def check_mode(self, mode: str) -> None:
        """Raise ValueError unless every engine can be made quiet in this mode, as far as it is known what they are."""
        known = [engine.dialect for engine in self.fleet.engines() if engine.known]
        if not known and any(mode in dialect.weights.modes for dialect in BY_NAME.values()):
            return
        for dialect in known or BY_NAME.values():
            dialect.weights.pause_mode(mode)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called. Does not block."""
        with self._lock:
            return self._closed

    def check_open(self) -> None:
        """Raise ClientClosedError if it is closed."""
        if self.is_closed:
            raise ClientClosedError("the client is closed")

    def vocab_size(self) -> int | None:
        """The smallest known vocabulary of the engines."""
        sizes = [engine.facts.vocab_size for engine in self.fleet.engines()]
        return min((size for size in sizes if size is not None), default=None)

    # --- making samples ---

    def read(self, batch: Any, rules: BatchRules) -> list[Item]:
        """The items of a batch, checked; asks new engines what they are, for the vocabulary."""
        self.check_open()
        items = read_batch(batch, rules)
        self._warn_of_penalties(items)
        if not all(isinstance(item, Sample) for item in items):
            self.ready()
            check_vocabulary(items, self.vocab_size())
        return items

    def _warn_of_penalties(self, items: list[Item]) -> None:
        penalised = sum(isinstance(item, Resumed) and item.penalised for item in items)
        with self._lock:
            warn, self._warned = penalised and not self._warned, bool(self._warned or penalised)
        if warn:
            advice = "engines count the tokens of a resumed request as prompt, to which penalties do not apply"
            log.warning("%d partials with penalties are resumed: %s; this is said once", penalised, advice)

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
        deadline = Deadline.after(self.fleet.active, request.timeout)
        return self._make_orders(_wanted(request), job, stop, deadline)

    def _make_orders(self, wanted: Iterable[Wanted], job: int, stop: Stop, deadline: Deadline) -> list[Order]:
        now, active, closings = self.clock.monotonic(), self.fleet.active.monotonic(), self.fleet.closings
        return [
            Order(
                prompt=one.prompt if one.base is not None else self._of_member(one.prompt, one.member),
                index=one.index,
                member=one.member,
                group=one.group if one.group.sticky else self._sessions.group_of(one.prompt) or one.group,
                job=job,
                deadline=deadline,
                admitted_at=now,
                admitted_active=active,
                closings=closings,
                priority=int(one.prompt.fields.get("priority", 0)),
                stops=(stop,),
                base=one.base,
            )
            for one in wanted
        ]

    def _of_member(self, prompt: Prompt, member: int) -> Prompt:
        """The prompt of one member: a seed is the first member's, and one more for each further member."""
        params = prompt.sampling_params
        seed = params.get(self.vocabulary.seed)
        if seed is None or member == 0:
            return prompt
        return replace(prompt, sampling_params={**params, self.vocabulary.seed: int(seed) + member})

    def submit(self, request: Request) -> SampleFuture:
        """Admit a single order; its future."""
        stop, number = Stop(), next(self._jobs)
        future = SampleFuture(stop, lambda: self._abort_later(number))
        item = request.items[0]
        if isinstance(item, Sample):
            future.set_result(item)
            return future
        future.set_running_or_notify_cancel()
        orders = [replace(order, calls_back=True) for order in self._orders(request, number, stop)]
        self.workers.admit(orders, lambda _, sample: future.set_result(sample))
        return future

    def collect(self, plan: Plan, rules: BatchRules) -> Collected:
        """Block until a collect has ended. It is one job, whatever it submits."""
        self.ready()
        number, stop, never = next(self._jobs), Stop(), Deadline.after(self.clock, None)
        rules = replace(rules, keep_partials=plan.keep_partials)
        means = Means(
            read=lambda items, n: self.read(items, replace(rules, n=n)),
            of_member=self._of_member,
            admit=lambda wanted, deliver: self.workers.admit(self._make_orders(wanted, number, stop, never), deliver),
            abort=lambda timeout: self._abort_job(number, timeout),
            stop=stop,
            clock=self.clock,
            deadline=Deadline.after(self.fleet.active, plan.timeout),
        )
        return Collector(plan, means).run()

    def stage(self, rules: BatchRules, timeout: float | None) -> Stage:
        """What the episodes of one map need; the map is one job. Asks new engines what they are."""
        self.ready()
        number, stop = next(self._jobs), Stop()

        def make(wanted: Wanted, deadline: Deadline) -> Sample:
            return self.workers.lend(self._make_orders([wanted], number, stop, deadline)[0])

        return Stage(
            name=self.name,
            job=number,
            clock=self.clock,
            active=self.fleet.active,
            deadline=Deadline.after(self.fleet.active, timeout),
            cuts=lambda: self.fleet.cuts,
            cuts_before=self.fleet.cuts,
            closed=lambda: self.is_closed,
            read=lambda item, own, fields: self.read([item], overridden(rules, own, fields))[0],
            make=make,
            abort=lambda limit: self._abort_job(number, limit),
            stop=stop,
        )

    def episodes_at_once(self, wanted: int | None) -> int:
        """How many threads a map may have; the number of requests that engines take is a good guess."""
        return wanted or max(_FEWEST_EPISODES, min(_MOST_EPISODES, self.fleet.capacity()))

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
        self.quiet.let_go(deadline.within(_ABORT_ON_CLOSE_S))
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


def _wanted(request: Request) -> Iterator[Wanted]:
    """The samples that are to be made, one by one: there may be many thousands."""
    for index, item in enumerate(request.items):
        group = Group(request.n)
        if isinstance(item, Resumed):
            yield Wanted(item.prompt, index, 0, group, item.base)
        elif isinstance(item, Prompt):
            for member in range(request.n):
                yield Wanted(item, index, member, group)
