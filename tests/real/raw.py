"""An engine spoken to with plain `requests`, so that these tests know nothing of the client under construction."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import requests

WAIT_S = 20.0
POLL_S = 0.05

Load = Mapping[str, Any]


class RawEngine:
    """One engine by its URL. `begin` runs calls on threads of its own; everything else blocks the caller."""

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self.url = url
        self._pool = pool
        self._begun: list[Future[requests.Response]] = []

    def get(self, path: str) -> requests.Response:
        """Sends a GET on a connection of its own."""
        return self._send("GET", path)

    def post(self, path: str, body: object = None) -> requests.Response:
        """Sends a POST with a JSON body, or without a body if `body` is None."""
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: object = None) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            session.headers["Connection"] = "close"  # a kept response keeps its pool, and with it the socket
            return session.request(method, f"{self.url}{path}", json=body, timeout=60)

    def begin(
        self, rid: str | None = None, *, tokens: int = 1500, ids: Sequence[int] = (5, 6, 7), **fields: object
    ) -> Future[requests.Response]:
        """Starts a generation of exactly `tokens` tokens, unless something ends it."""
        call = self._pool.submit(self.post, "/generate", generation(rid or uuid4().hex, tokens, ids, **fields))
        self._begun.append(call)
        return call

    def generate(self, **fields: Any) -> dict[str, Any]:
        """Runs a short generation to its end and returns the answer."""
        answer = self.begin(**{"tokens": 4, **fields}).result(WAIT_S)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def abort(self, rid: str) -> None:
        """Aborts by rid."""
        assert self.post("/abort_request", {"rid": rid, "abort_all": False}).status_code == 200

    def abort_all(self) -> None:
        """Aborts whatever the engine knows of."""
        assert self.post("/abort_request", {"rid": "", "abort_all": True}).status_code == 200

    def pause(self, mode: str) -> None:
        """Pauses in this mode."""
        answer = self.post("/pause_generation", {"mode": mode})
        assert answer.status_code == 200, answer.text

    def resume(self) -> None:
        """Ends the pause."""
        answer = self.post("/continue_generation", {})
        assert answer.status_code == 200, answer.text

    def slow_down(self, seconds: float) -> None:
        """Makes every forward pass, hence every token, take at least this long."""
        answer = self.post("/slow_down", {"forward_sleep_time": seconds})
        assert answer.status_code == 200, answer.text

    def load(self) -> Load:
        """The load of the only rank, as it was published last."""
        ranks = self.get("/v1/loads").json()["loads"]
        assert len(ranks) == 1, ranks
        rank: Load = ranks[0]
        return rank

    def await_load(self, wanted: Callable[[Load], bool], what: str) -> Load:
        """Polls the load until it is as wanted."""
        deadline = time.monotonic() + WAIT_S
        while not wanted(load := self.load()):
            assert time.monotonic() < deadline, f"{self.url} never showed {what}; last: {dict(load)}"
            time.sleep(POLL_S)
        return load

    def await_counts(self, running: int, waiting: int = 0) -> Load:
        """Polls until so many requests run and wait."""
        return self.await_load(
            lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting),
            f"{running} running and {waiting} waiting",
        )

    def await_later(self, load: Load) -> Load:
        """Polls until the scheduler has published another snapshot than this one."""
        return self.await_load(lambda later: bool(later["timestamp"] != load["timestamp"]), "a later snapshot")

    def end_all(self) -> None:
        """Resumes and aborts until every generation that was begun has its answer."""
        deadline = time.monotonic() + WAIT_S
        while wait(self._begun, timeout=0.5).not_done:
            self.resume()
            self.abort_all()
            assert time.monotonic() < deadline, f"{self.url} leaves generations unanswered"

    @contextmanager
    def unanswered(self, rid: str, tokens: int) -> Iterator[http.client.HTTPConnection]:
        """Sends a generation, and yields its connection with the answer unread once the engine has read the request."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        body = json.dumps(generation(rid, tokens, (5, 6, 7)))
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            for _ in range(2):  # the engine's event loop reads in order of arrival
                assert self.get("/model_info").status_code == 200
            yield connection
        finally:
            connection.close()


def generation(rid: str, tokens: int, ids: Sequence[int], **fields: object) -> dict[str, object]:
    """The body of a /generate call that does not stop by itself before `tokens` tokens."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    return {"rid": rid, "input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **fields}


@contextmanager
def raw_engines(urls: Sequence[str]) -> Iterator[list[RawEngine]]:
    """Wraps engines for one test; whatever a failed test left running is ended."""
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="raw") as pool:
        engines = [RawEngine(url, pool) for url in urls]
        try:
            yield engines
        finally:
            for engine in engines:
                engine.end_all()
