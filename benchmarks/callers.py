"""Who uses the client in a soak: callers that make samples in every way there is, and trainers in between."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.books import Ask, Books
from benchmarks.findings import Findings
from benchmarks.watch import Stopwatch
from rolloutsync import ControlError, RolloutClient

PAUSES = ("abort", "in_place", "retract")
_ABORT_S = 10.0  # for the requests of one job
_RESUME_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long calls may take, in seconds.

    Attributes:
        sample_s: A call that makes samples.
        control_s: A call that every engine must answer.
        look_s: A call that only looks.
        slack_s: What a busy machine adds to any.
    """

    sample_s: float
    control_s: float
    look_s: float = 1.0
    slack_s: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What all threads of one client share."""

    client: RolloutClient
    books: Books
    findings: Findings
    watch: Stopwatch
    limits: Limits
    over: threading.Event


class Actor:
    """A thread that does one thing after another, chosen by chance, until it is told that it is over.

    Args:
        stage: See there.
        name: Of the thread.
        seed: Of its choices.
        rest_s: It rests up to so long between two things.
    """

    def __init__(self, stage: Stage, name: str, seed: str, rest_s: float) -> None:
        self._stage = stage
        self._client = stage.client
        self._chance = Random(f"{name}/{seed}")
        self._rest_s = rest_s
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while not self._rest(self._chance.uniform(0.0, self._rest_s)):
            things = self._things()
            thing = self._chance.choices(list(things), list(things.values()))[0]
            try:
                thing()
            except Exception:  # noqa: BLE001 - a thread's outermost frame: whatever comes here should not have come
                self._stage.findings.add("unexpected errors", f"{self.thread.name}: {traceback.format_exc()}")

    def _rest(self, seconds: float) -> bool:
        """Whether it is over."""
        return self._stage.over.wait(seconds)

    def _things(self) -> dict[Callable[[], None], int]:
        """What may be done, and how often compared with the rest."""
        raise NotImplementedError


class Caller(Actor):
    """Makes samples."""

    def _things(self) -> dict[Callable[[], None], int]:
        return {
            self._generate: 10,
            self._evaluate: 1,
            self._result: 3,
            self._iterate: 2,
            self._groups: 2,
            self._leave: 3,
            self._abort: 2,
            self._submit: 5,
        }

    def _asks(self, most: int = 4) -> list[Ask]:
        return [self._stage.books.ask(self._chance) for _ in range(self._chance.randint(1, most))]

    def _generate(self, most: int = 4) -> None:
        asks, n = self._asks(most), self._chance.randint(1, 2)
        books = self._stage.books
        books.wants(asks, n)
        with self._stage.watch.timing("generate", self._stage.limits.sample_s):
            samples = self._client.generate([ask.item for ask in asks], n=n, on_error="return")
        books.receive(asks, samples, n)

    def _evaluate(self) -> None:
        self._generate(most=32)

    def _with_job(self, use: Callable[[RolloutClient, list[Ask], int], None]) -> None:
        asks, n = self._asks(), self._chance.randint(1, 2)
        self._stage.books.wants(asks, n)
        with self._stage.watch.timing("start", self._stage.limits.sample_s):
            use(self._client, asks, n)

    def _result(self) -> None:
        def use(client: RolloutClient, asks: list[Ask], n: int) -> None:
            job = client.start([ask.item for ask in asks], n=n, on_error="return")
            self._stage.books.receive(asks, job.result(), n)

        self._with_job(use)

    def _iterate(self) -> None:
        def use(client: RolloutClient, asks: list[Ask], n: int) -> None:
            job = client.start([ask.item for ask in asks], n=n, on_error="return")
            found = sorted(job, key=lambda sample: (sample.index, sample.member))
            self._stage.books.receive(asks, found, n)

        self._with_job(use)

    def _groups(self) -> None:
        def use(client: RolloutClient, asks: list[Ask], n: int) -> None:
            job = client.start([ask.item for ask in asks], n=n, on_error="return")
            groups = sorted(job.groups(), key=lambda group: group[0].index)
            self._stage.books.receive(asks, list(itertools.chain.from_iterable(groups)), n)

        self._with_job(use)

    def _leave(self) -> None:
        """After the first sample."""

        def use(client: RolloutClient, asks: list[Ask], n: int) -> None:
            with client.start([ask.item for ask in asks], n=n, on_error="return") as job:
                next(iter(job))
            self._stage.books.receive(asks, job.result(), n)

        self._with_job(use)

    def _abort(self) -> None:
        """After a while."""

        def use(client: RolloutClient, asks: list[Ask], n: int) -> None:
            job = client.start([ask.item for ask in asks], n=n, on_error="return")
            self._rest(self._chance.uniform(0.0, 1.0))
            with self._stage.watch.timing("job.abort", _ABORT_S + self._stage.limits.slack_s):
                job.abort(_ABORT_S)
            self._stage.books.receive(asks, job.result(), n)

        self._with_job(use)

    def _submit(self) -> None:
        """Each for itself; some are cancelled."""
        asks = self._asks()
        self._stage.books.wants(asks)
        with self._stage.watch.timing("submit", self._stage.limits.sample_s):
            futures = [self._client.submit(ask.item) for ask in asks]
            if self._chance.random() < 0.5:
                self._rest(self._chance.uniform(0.0, 1.0))
                self._chance.choice(futures).cancel()
            samples = [future.result() for future in futures]
        for ask, sample in zip(asks, samples, strict=True):
            self._stage.books.receive([ask], [sample])


class Trainer(Actor):
    """Pauses, empties caches, changes the fleet. The only one of its client that does, and that holds the gate."""

    def _things(self) -> dict[Callable[[], None], int]:
        return {self._pause: 3, self._flush: 1, self._control: 1, self._replace: 2, self._stay_closed: 1}

    def _controlled(self, what: str, call: Callable[[], object]) -> bool:
        """Whether every engine obeyed; one that is down, frozen or busy cannot."""
        with self._stage.watch.timing(what, self._stage.limits.control_s):
            try:
                call()
            except ControlError:
                return False
        return True

    def _pause(self) -> None:
        mode = self._chance.choice(PAUSES)
        self._controlled(f"pause({mode})", lambda: self._client.pause(mode))
        self._rest(self._chance.uniform(0.0, 1.5))
        self._resume()

    def _resume(self) -> None:
        """Until it is done: nothing runs before."""
        with self._stage.watch.timing("resumed after all", _RESUME_S):
            while not self._controlled("resume", self._client.resume):
                threading.Event().wait(0.2)

    def _stay_closed(self) -> None:
        with self._stage.watch.timing("abort_until_idle", 5.0 + self._stage.limits.slack_s):
            self._client.abort_until_idle(5.0, keep_closed=True, raise_on_timeout=False)
        self._rest(self._chance.uniform(0.0, 1.0))
        self._resume()

    def _flush(self) -> None:
        self._controlled("flush_cache", self._client.flush_cache)

    def _control(self) -> None:
        self._controlled("control", lambda: self._client.control("/server_info", method="GET"))

    def _replace(self) -> None:
        """Remove an engine; add it again a moment later."""
        url = self._chance.choice([engine.url for engine in self._client.engines()])
        with self._stage.watch.timing("remove_engine", self._stage.limits.look_s + self._stage.limits.slack_s):
            self._client.remove_engine(url)
        self._rest(self._chance.uniform(0.0, 2.0))
        with self._stage.watch.timing("add_engine", self._stage.limits.control_s):
            self._client.add_engine(url)


class Stepper(Actor):
    """Ends steps: aborts until idle. And looks, as a trainer's log does."""

    def _things(self) -> dict[Callable[[], None], int]:
        return {self._drain: 2, self._drain_own: 1, self._look: 4}

    def _drain(self) -> None:
        timeout = self._chance.uniform(2.0, 10.0)
        with self._stage.watch.timing("abort_until_idle", timeout + self._stage.limits.slack_s):
            self._client.abort_until_idle(timeout, raise_on_timeout=False)

    def _drain_own(self) -> None:
        timeout = self._chance.uniform(2.0, 10.0)
        with self._stage.watch.timing("abort_until_idle(own)", timeout + self._stage.limits.slack_s):
            self._client.abort_until_idle(timeout, scope="own", raise_on_timeout=False)

    def _look(self) -> None:
        with self._stage.watch.timing("loads, engines", self._stage.limits.control_s):
            self._client.loads()
            self._client.engines()
        with self._stage.watch.timing("audit, stats, dump", self._stage.limits.look_s + self._stage.limits.slack_s):
            audit = self._client.audit()
            self._client.stats()
            self._client.dump()
        if not audit.balanced:
            self._stage.findings.add("books out of balance", str(audit))
