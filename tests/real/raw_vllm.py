"""A vLLM engine spoken to with plain `requests`, as `raw` does with SGLang."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import requests

from .raw import POLL_S, WAIT_S

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
GAUGE = r"^vllm:num_requests_{}\{{[^}}]*\}} (\S+)$"
HOLD_S = 0.5  # how long something that must not happen is watched


class RawVllm:
    """One engine by its URL. `begin` runs calls on threads of its own; everything else blocks the caller."""

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self.url = url
        self._pool = pool
        self._begun: list[Future[requests.Response]] = []

    def get(self, path: str, timeout: float = 60.0) -> requests.Response:
        """Sends a GET on a connection of its own."""
        return self._send("GET", path, timeout=timeout)

    def post(
        self, path: str, body: object = None, headers: dict[str, str] | None = None, timeout: float = 60.0
    ) -> requests.Response:
        """Sends a POST with a JSON body, or without a body if `body` is None."""
        return self._send("POST", path, body, headers, timeout)

    def _send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            session.headers["Connection"] = "close"  # a kept response keeps its pool, and with it the socket
            return session.request(method, self.url + path, json=body, headers=headers, timeout=timeout)

    def begin(
        self, rid: str | None = None, *, tokens: int = 2000, ids: Sequence[int] = (5, 6, 7), **sampling: object
    ) -> Future[requests.Response]:
        """Starts a generation of exactly `tokens` tokens, unless something ends it."""
        return self._start(GENERATE, generation(rid or uuid4().hex, tokens, ids, **sampling))

    def begin_completion(self, body: dict[str, object]) -> Future[requests.Response]:
        """Starts a call of the OpenAI route."""
        return self._start(COMPLETIONS, body)

    def _start(self, path: str, body: dict[str, object]) -> Future[requests.Response]:
        call = self._pool.submit(self.post, path, body)
        self._begun.append(call)
        return call

    def generate(self, **fields: Any) -> dict[str, Any]:
        """Runs a short generation to its end and returns the answer."""
        return answered(self.begin(**{"tokens": 4, **fields}))

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Runs a greedy call of four tokens of the OpenAI route to its end and returns the answer."""
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
        return answered(self.begin_completion(body))

    def abort(self, *ids: str) -> int:
        """Aborts by the engine's own ids; returns what it says it has aborted."""
        return self._aborted({"request_ids": list(ids)})

    def abort_all(self) -> int:
        """Aborts whatever the engine's front end knows of; returns what it says it has aborted."""
        return self._aborted({})

    def _aborted(self, body: dict[str, object]) -> int:
        answer = self.post("/abort_requests", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "aborted"
        return int(answer.json()["aborted"])

    def pause(self, mode: str) -> None:
        """Pauses in this mode."""
        answer = self.post(f"/pause?mode={mode}")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"}), answer.text

    def resume(self) -> None:
        """Ends the pause."""
        answer = self.post("/resume")
        assert (answer.status_code, answer.json()) == (200, {"status": "resumed"}), answer.text

    def counts(self) -> tuple[int, int]:
        """How many requests run and wait, by `/metrics`."""
        text = self.get("/metrics").text
        return gauge(text, "running"), gauge(text, "waiting")

    def load(self) -> int:
        """How many calls the web server holds, where it counts them."""
        return int(self.get("/load").json()["server_load"])

    def await_counts(self, running: int, waiting: int = 0) -> None:
        """Polls until so many requests run and wait."""
        await_equal(self.counts, (running, waiting), f"{self.url}: running and waiting", self.story)

    def story(self) -> str:
        """What has become of the generations that were begun."""
        ended = [call for call in self._begun if call.done()]
        told = [str(call.exception() or call.result().text[-300:]) for call in ended]
        return f"{len(ended)} of {len(self._begun)} generations have ended: {told}"

    def await_load(self, calls: int) -> None:
        """Polls until the web server holds so many calls."""
        await_equal(self.load, calls, f"{self.url}: /load")

    def end_all(self) -> None:
        """Resumes and aborts until every generation that was begun has its answer."""
        deadline = time.monotonic() + WAIT_S
        while wait(self._begun, timeout=0.5).not_done:
            settle_vllm(self.url)
            assert time.monotonic() < deadline, f"{self.url} leaves generations unanswered"

    @contextmanager
    def unanswered(self, rid: str, tokens: int = 2000) -> Iterator[socket.socket]:
        """Sends a generation and yields its connection, the answer unread."""
        address = urlsplit(self.url)
        body = json.dumps(generation(rid, tokens, (5, 6, 7))).encode()
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: vllm\r\nContent-Type: application/json\r\n"
        with socket.create_connection((str(address.hostname), int(address.port or 0)), 60) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            yield connection


def generation(rid: str, tokens: int, ids: Sequence[int], **sampling: object) -> dict[str, object]:
    """The body of a call that does not stop by itself before `tokens` tokens."""
    asked = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0, **sampling}
    return {"request_id": rid, "token_ids": list(ids), "sampling_params": asked}


def answered(call: Future[requests.Response]) -> dict[str, Any]:
    """The body of a call that was answered with 200."""
    answer = call.result(WAIT_S)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def gauge(metrics: str, which: str) -> int:
    """The sum of a gauge over the engine's ranks; at least one must be there."""
    values = re.findall(GAUGE.format(which), metrics, re.MULTILINE)
    assert values, metrics
    return int(sum(float(value) for value in values))


def await_equal(look: Callable[[], Any], wanted: Any, what: str, more: Callable[[], str] = str) -> None:
    """Polls until a look shows what is wanted; `more` is asked for what to add where it does not."""
    deadline = time.monotonic() + WAIT_S
    while (seen := look()) != wanted:
        assert time.monotonic() < deadline, f"{what} should become {wanted}; last: {seen}; {more()}"
        time.sleep(POLL_S / 5)


def settle_vllm(url: str) -> None:
    """Leaves an engine with dev mode as a test should find it: not paused, and idle by its core's word."""
    with ThreadPoolExecutor(1) as pool:
        engine = RawVllm(url, pool)
        engine.resume()
        await_equal(engine.abort_all, 0, f"{url}: what an abort of all has found")
        assert engine.get("/is_paused").json() == {"is_paused": False}
        engine.await_counts(0)


@contextmanager
def raw_vllm(url: str) -> Iterator[RawVllm]:
    """Wraps an engine for one test; whatever a failed test left running is ended."""
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="raw") as pool:
        engine = RawVllm(url, pool)
        try:
            yield engine
        finally:
            engine.end_all()
