"""A soak: hundreds of threads on engines that die, freeze, reset, drip and come back. At the end every book balances.

    python benchmarks/soak.py --minutes 2 --seed 1

Who does what to whom is chosen by the seed; when it meets what is not. Exits with 1 if anything is wrong, and names it.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.books import Books
from benchmarks.callers import Actor, Caller, Limits, Stage, Stepper, Trainer
from benchmarks.chaos import Chaos
from benchmarks.findings import Findings
from benchmarks.report import table
from benchmarks.watch import Stopwatch
from benchmarks.witness import Witness, sockets_to
from rolloutsync import EngineState, NotIdleError, RetryPolicy, RolloutClient, Status, Timeouts
from rolloutsync.sim import SimFleet

T = TypeVar("T")
READMIT_S = 30.0
IDLE_S = 30.0
CLOSE_S = 10.0
SETTLE_S = 5.0
CONTROL_S = 2.0
LAST_PROMPTS = 64
LAST_TOKENS = 32
THINK_S = 4.0
STEP_S = 8.0
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is soaked, and how long; the command line has the same names, with the same defaults.

    Attributes:
        minutes: Of chaos.
        seed: Of everything that is chosen by chance.
        engines: Simulated engines, each a process.
        callers: Threads that make samples, over all clients.
        clients: On the same engines. Their engine-wide aborts then meet each other's requests.
        running: Requests that an engine runs at once.
        speed: Tokens per second of one request.
        dead_s: ``Timeouts.dead_s``: within the soak, unlike the default of 30 s.
        sample_s: ``Timeouts.sample_s``.
        grace_s: All calls must have ended so long after the chaos.
        copies_s: A second copy of a sample may run so long.
        memory_mb: The last quarter may take so much more memory than the second one.
    """

    minutes: float = 2.0
    seed: int = 1
    engines: int = 4
    callers: int = 200
    clients: int = 1
    running: int = 32
    speed: float = 60.0
    dead_s: float = 3.0
    sample_s: float = 90.0
    grace_s: float = 120.0
    copies_s: float = 8.0
    memory_mb: float = 24.0

    def timeouts(self) -> Timeouts:
        return Timeouts(
            connect_s=CONTROL_S,
            control_s=CONTROL_S,
            sample_s=self.sample_s,
            dead_s=self.dead_s,
            half_open_s=2 * self.dead_s,
        )

    def limits(self) -> Limits:
        """Samples may wait for a thread before their own time begins."""
        return Limits(sample_s=self.sample_s + self.grace_s, control_s=6 * CONTROL_S)


class ErrorCounter(logging.Handler):
    """Warnings are part of a soak, and counted; an ERROR is a finding."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.WARNING)
        self._findings = findings
        self.warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings += record.levelno == logging.WARNING
        if record.levelno > logging.WARNING:
            words = logging.Formatter().format(record)
            self._findings.add("unexpected errors", words)


@dataclass
class Soak:
    """One run. Make it, ``run`` it, print its ``report``."""

    options: Options
    findings: Findings = field(default_factory=Findings)
    audits: list[str] = field(default_factory=list)
    facts: list[tuple[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        self._over = threading.Event()
        self._books = Books(self.findings, RetryPolicy().max_attempts)
        self._watch = Stopwatch(self.findings)
        self._fleet = SimFleet(
            options.engines,
            max_running_requests=options.running,
            tokens_per_second=options.speed,
            disconnect_poll_s=0.5,
        )
        self._witness = Witness(self._fleet, self.findings, options.copies_s, self._books.size)
        self._chaos = Chaos(self._fleet, options.seed, 60 * options.minutes, self._witness.take_down)
        self._clients: list[RolloutClient] = []

    # --- the run ---

    def run(self) -> bool:
        """Whether all is well. Blocks for the minutes and at most twice the grace."""
        counter = ErrorCounter(self.findings)
        logger = logging.getLogger("rolloutsync")
        logger.addHandler(counter)
        watchdog = threading.Timer(60 * self.options.minutes + 2 * self.options.grace_s, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            with self._fleet:
                self._soak()
        finally:
            watchdog.cancel()
            logger.removeHandler(counter)
        self.facts.append(("warnings logged", counter.warnings))
        return not self.findings

    def _soak(self) -> None:
        urls = self._fleet.urls
        self._clients = [RolloutClient(urls, timeouts=self.options.timeouts()) for _ in range(self.options.clients)]
        stages = [self._stage(client) for client in self._clients]
        callers, others = self._callers(stages), self._others(stages)
        self._witness.start()
        self._chaos.start()
        for actor in [*callers, *others]:
            actor.thread.start()
        time.sleep(60 * self.options.minutes)
        self._over.set()
        self._chaos.stop()
        self._join(others)
        self._await_engines()
        self._await_idle()  # gives the calls that still run their answers
        self._join(callers)
        self._end()

    def _stage(self, client: RolloutClient) -> Stage:
        limits = self.options.limits()
        return Stage(
            client=client, books=self._books, findings=self.findings, watch=self._watch, limits=limits, over=self._over
        )

    def _callers(self, stages: Sequence[Stage]) -> list[Actor]:
        seed = str(self.options.seed)
        return [
            Caller(stages[number % len(stages)], f"caller-{number}", seed, THINK_S)
            for number in range(self.options.callers)
        ]

    def _others(self, stages: Sequence[Stage]) -> list[Actor]:
        seed, pairs = str(self.options.seed), list(enumerate(stages))
        trainers: list[Actor] = [Trainer(stage, f"trainer-{number}", seed, STEP_S) for number, stage in pairs]
        return [*trainers, *(Stepper(stage, f"stepper-{number}", seed, STEP_S) for number, stage in pairs)]

    def _join(self, actors: Sequence[Actor]) -> None:
        """Wait until each has ended what it does; who does not hangs."""
        until = time.monotonic() + self.options.grace_s
        for actor in actors:
            actor.thread.join(max(0.0, until - time.monotonic()))
        stuck = [actor.thread.name for actor in actors if actor.thread.is_alive()]
        if stuck:
            self.findings.add("calls that hang", f"{', '.join(stuck)}\n{self._dumps()}", len(stuck))

    def _dumps(self) -> str:
        return "\n".join(client.dump() for client in self._clients)

    def _give_up(self) -> None:
        """The run itself hangs: say where, and end the process."""
        print(f"HANGS\n{self._dumps()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(0.1, exit=True)

    # --- the end ---

    def _end(self) -> None:
        self._await_idle()
        self._last_batch()
        self._check_audits()
        self._check_engines()
        self._witness.stop()
        self._check_memory()
        self._close()
        self._books.settle(self._witness.generations())

    def _await_engines(self) -> None:
        """All engines are healed, so each client takes them back."""
        until = time.monotonic() + READMIT_S
        while away := [
            engine for client in self._clients for engine in client.engines() if engine.state is not EngineState.LIVE
        ]:
            if time.monotonic() > until:
                words = "; ".join(f"{engine.url} is {engine.state}: {engine.reason}" for engine in away)
                self.findings.add("engines not readmitted", words, len(away))
                return
            time.sleep(0.1)

    def _await_idle(self) -> None:
        for client in self._clients:
            try:
                client.abort_until_idle(IDLE_S)
            except NotIdleError as error:
                self.findings.add("requests running at the end", str(error))

    def _last_batch(self) -> None:
        """On healed engines each sample is whole."""
        chance = Random(self.options.seed)
        for client in self._clients:
            asks = [replace(self._books.ask(chance), tokens=LAST_TOKENS) for _ in range(LAST_PROMPTS)]
            self._books.wants(asks)
            samples = client.generate([ask.item for ask in asks], on_error="return")
            self._books.receive(asks, samples)
            cut = [f"{sample.status}: {sample.error!r}" for sample in samples if sample.status is not Status.TRUNCATED]
            if cut:
                self.findings.add("failures without a good reason", f"when all was well: {cut[0]}", len(cut))

    def _check_audits(self) -> None:
        for client in self._clients:
            audit = client.audit()
            self.audits.append(str(audit))
            if not audit.balanced:
                self.findings.add("books out of balance", str(audit))
            if audit.open:
                self.findings.add("samples open at the end", f"{audit}\n{client.dump()}", len(audit.open))
            if audit.orphans:
                self.findings.add("orphans at the end", str(audit), len(audit.orphans))
            if client.stats().gate != "open":
                self.findings.add("calls that hang", f"the gate is {client.stats().gate}")

    def _check_engines(self) -> None:
        """Nothing runs there, by their own word."""
        for engine in self._fleet.engines:
            state = self._witness.take_down(engine)
            left = None if state is None else state["running"] + state["waiting"] + state["live"]
            if left != 0:
                words = f"{engine.url}: {left} requests" if state else f"{engine.url} does not answer"
                self.findings.add("requests running at the end", words, left or 1)

    def _check_memory(self) -> None:
        early, late, growth = self._witness.growth_mb()
        self.facts += self._witness.facts()
        self.facts.append(("least memory, second and last quarter", f"{early:.0f} MB, {late:.0f} MB"))
        if growth > self.options.memory_mb:
            words = f"{early:.0f} MB in the second quarter, {late:.0f} MB in the last"
            self.findings.add("megabytes grown beyond the limit", words, round(growth - self.options.memory_mb) or 1)

    def _close(self) -> None:
        ports = {engine.port for engine in self._fleet.engines}
        for client in self._clients:
            with self._watch.timing("close", CLOSE_S + 1.0):
                left = client.close(CLOSE_S)
            if left:
                self.findings.add("threads left after close", f"close() told of {left}", len(left))
        threads = _settled(lambda: [t.name for t in threading.enumerate() if t.name.startswith("rolloutsync")])
        if threads:
            self.findings.add("threads left after close", ", ".join(threads), len(threads))
        sockets = _settled(lambda: list(sockets_to(ports).items()))
        if sockets:
            self.findings.add("sockets left after close", str(sockets), len(sockets))

    # --- the report ---

    def report(self) -> str:
        """What happened, how long calls took, and what must be zero."""
        wanted, unsent, tokens = self._books.totals()
        failures = self._books.failures()
        happened = [
            ("samples asked for", wanted),
            ("of these never sent, a drain came first", unsent),
            ("tokens delivered", tokens),
            *self._books.statuses().items(),
            *((f"FAILED: {name}", count) for name, count in _kinds(failures).items()),
            *((f"engines: {kind}", count) for kind, count in self._chaos.done().items()),
            *self.facts,
        ]
        calls = [(what, count, f"{slowest:.2f}") for what, count, slowest in self._watch.rows()]
        parts = [
            table(("what happened", "count"), happened),
            table(("call", "calls", "slowest, s"), calls),
            "\n".join(["failed, the first few:", *failures[:SHOWN]]),
            "\n".join(self.audits),
            table(("must be zero", "count"), list(self.findings.counts().items())),
            *self.findings.lines(),
            "FAILED" if self.findings else "passed",
        ]
        return "\n\n".join(parts)


def _kinds(failures: Sequence[str]) -> dict[str, int]:
    return dict(sorted(Counter(words.partition(":")[0] for words in failures).items()))


def _settled(find: Callable[[], list[T]]) -> list[T]:
    """What is found still after a moment."""
    until = time.monotonic() + SETTLE_S
    while (found := find()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def read_options(arguments: Sequence[str] | None) -> Options:
    """Options from a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Options()
    for name in Options.__dataclass_fields__:
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"({value})")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak, print its report; 1 if anything is wrong."""
    soak = Soak(read_options(arguments))
    good = soak.run()
    print(soak.report())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
