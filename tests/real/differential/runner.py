"""Takes the steps of a sequence against one engine and writes down what happened, timing and token values aside."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .shape import Facts, facts_of
from .steps import Step

WAIT_S = 15.0
POLL_S = 0.01
FRESH = 2
SOCKET_TIMEOUT_S = 60.0
TOKEN_COUNTS = ("num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens")


@dataclass(frozen=True)
class Answer:
    """One answer, fully read, and when."""

    status: int
    content_type: str
    data: bytes
    at: float

    @property
    def facts(self) -> Facts:
        """What is compared of it."""
        return facts_of(self.status, self.content_type, self.data)


class Runner:
    """One engine by its URL, and the calls that it has not answered yet.

    Calls are sent from the caller's thread, so that the engine gets them in order; answers are read on threads.
    """

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._address = urlsplit(url)
        self._pool = pool
        self._open: dict[str, Future[Answer]] = {}

    def take(self, step: Step) -> Facts:
        """Takes one step and returns what happened."""
        call = self._send(step)
        facts: Facts = {}
        if step.name:
            self._open[step.name] = call
            self._fence()
        else:
            facts |= _facts_of_call("call", call)
        wait([self._open[name] for name in step.answers], timeout=WAIT_S)
        facts |= self._collect(step.answers, ordered=step.ordered)
        if step.load is not None:
            facts["load"] = self._await_load(*step.load, later=FRESH if step.fresh else 0)
            facts |= self._collect(())
        facts["open"] = " ".join(sorted(self._open))
        return facts

    def _send(self, step: Step) -> Future[Answer]:
        connection = self._connect()
        connection.request(step.method, step.path, _encoded(step.body), {"Content-Type": "application/json"})
        return self._pool.submit(_read, connection)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=SOCKET_TIMEOUT_S)

    def _get(self, path: str) -> Any:
        answer = self._send(Step(what="look", method="GET", path=path)).result(WAIT_S)
        assert answer.status == 200, answer
        return json.loads(answer.data)

    def _fence(self) -> None:
        """Returns when the engine, which reads in order, has read what was sent before."""
        for _ in range(2):
            self._get("/model_info")

    def _collect(self, expected: Sequence[str], *, ordered: bool = False) -> Facts:
        """Takes every answer that has come, expected or not, and says in which order where that is determined."""
        done = {name: call for name, call in self._open.items() if call.done()}
        facts: Facts = {}
        for name, call in done.items():
            facts |= _facts_of_call(name, call)
            del self._open[name]
        facts |= {name: "unanswered" for name in expected if name in self._open}
        if ordered:
            facts["order"] = " ".join(_in_order(done.items()))
        return facts

    def _rank(self) -> dict[str, Any]:
        rank: dict[str, Any] = self._get("/v1/loads")["loads"][0]
        return rank

    def _await_load(self, running: int, waiting: int, later: int = 0) -> str:
        """Polls until the load is as wanted, `later` snapshots from now; the last one seen is returned in any case."""
        deadline = time.monotonic() + WAIT_S
        seen: set[float] = set()
        while not _shows(load := self._rank(), running, waiting) or len(seen | {load["timestamp"]}) <= later:
            seen.add(load["timestamp"])
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        tokens = "tokens" if any(load[name] for name in TOKEN_COUNTS) else "no tokens"
        return f"{load['num_running_reqs']} running, {load['num_waiting_reqs']} waiting, {tokens}"

    def start_over(self) -> None:
        """Empties the cache, which an engine grants once it is idle."""
        deadline = time.monotonic() + WAIT_S
        while (facts := self.take(Step(what="start over", path="/flush_cache")))["call status"] != "200":
            assert time.monotonic() < deadline, f"{self._address.netloc} is not idle: {facts}"
            time.sleep(POLL_S)

    def tidy(self) -> None:
        """Leaves the engine idle: resumed, at full speed, with nothing open."""
        deadline = time.monotonic() + WAIT_S
        self.take(Step(what="tidy", path="/continue_generation", body={}))
        self.take(Step(what="tidy", path="/slow_down", body={"forward_sleep_time": None}))
        while wait(self._open.values(), timeout=0.2).not_done:
            self.take(Step(what="tidy", path="/abort_request", body={"abort_all": True}))
            assert time.monotonic() < deadline, f"{self._address.netloc} leaves open: {sorted(self._open)}"
        self._await_load(0, 0)


def run(url: str, steps: Iterable[Step]) -> list[Facts]:
    """Takes all steps against one engine, idle before and after; returns what happened at each."""
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="differential") as pool:
        runner = Runner(url, pool)
        runner.start_over()
        try:
            return [runner.take(step) for step in steps]
        finally:
            runner.tidy()


def _facts_of_call(name: str, call: Future[Answer]) -> Facts:
    try:
        answer = call.result(WAIT_S)
    except futures.TimeoutError:
        return {name: "unanswered"}
    except (OSError, http.client.HTTPException) as error:
        return {name: f"broken: {type(error).__name__}"}
    return {f"{name} {key}": value for key, value in answer.facts.items()}


def _in_order(calls: Iterable[tuple[str, Future[Answer]]]) -> list[str]:
    at: Callable[[tuple[str, Future[Answer]]], float] = lambda item: item[1].result().at  # noqa: E731
    return [name for name, _ in sorted(calls, key=at)]


def _shows(load: dict[str, Any], running: int, waiting: int) -> bool:
    if (load["num_running_reqs"], load["num_waiting_reqs"]) != (running, waiting):
        return False
    return bool(running or waiting) == any(load[name] for name in TOKEN_COUNTS)


def _encoded(body: Any) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def _read(connection: http.client.HTTPConnection) -> Answer:
    try:
        with connection.getresponse() as response:
            data = response.read()
            return Answer(response.status, response.getheader("Content-Type", ""), data, time.monotonic())
    finally:
        connection.close()
