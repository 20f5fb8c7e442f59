"""A small HTTP client of the standard library: these tests know nothing of the client under construction."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rolloutsync.sim import SimEngine

WAIT_S = 15.0
POLL_S = 0.005


@dataclass(frozen=True)
class Reply:
    """One answer, fully read."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        """The decoded body."""
        return json.loads(self.data)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.data.decode()

    @property
    def finish(self) -> dict[str, Any]:
        """How the generation ended; the answer must be a 200."""
        assert self.status == 200, self.text
        reason: dict[str, Any] = self.json["meta_info"]["finish_reason"]
        return reason

    @property
    def ids(self) -> list[int]:
        """The output ids; the answer must be a 200."""
        assert self.status == 200, self.text
        output: list[int] = self.json["output_ids"]
        return output


class Caller:
    """Calls one engine: `get` and `post` block, `begin` runs on a thread. Each call has its own connection."""

    def __init__(self, engine: SimEngine, pool: ThreadPoolExecutor) -> None:
        self.engine = engine
        self._pool = pool

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Makes a call; bytes are sent as they are, anything else but None as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.engine.port, timeout=WAIT_S)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            with connection.getresponse() as response:
                return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        """Makes a GET."""
        return self.call("GET", path)

    def post(self, path: str, body: Any = None) -> Reply:
        """Makes a POST."""
        return self.call("POST", path, body)

    def begin(self, path: str = "/generate", body: Any = None) -> Future[Reply]:
        """Makes a POST on a thread."""
        return self._pool.submit(self.post, path, body)

    def generate(self, ids: Sequence[int], tokens: int, **fields: Any) -> Reply:
        """Generates exactly `tokens` tokens, unless something ends it."""
        return self.post("/generate", generation(ids, tokens, **fields))

    def begin_generate(self, ids: Sequence[int], tokens: int, **fields: Any) -> Future[Reply]:
        """Generates on a thread."""
        return self.begin(body=generation(ids, tokens, **fields))

    def load(self) -> dict[str, Any]:
        """The load of the first rank."""
        rank: dict[str, Any] = self.get("/v1/loads").json["loads"][0]
        return rank

    def await_state(self, good: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Polls the simulation's own state until it is as wanted."""
        state: dict[str, Any] = until(self.engine.state, good, what)
        return state

    def await_row(self, rid: str, *states: str) -> dict[str, Any]:
        """Polls until the last generation with this id is in one of the states."""
        state = self.await_state(
            lambda state: any(each["state"] in states for each in rows(state, rid)), f"{rid} {states}"
        )
        return rows(state, rid)[-1]

    @contextmanager
    def unanswered(self, ids: Sequence[int], tokens: int, **fields: Any) -> Iterator[socket.socket]:
        """Sends a generation and yields its socket, which is closed at the end."""
        with self.sent("/generate", generation(ids, tokens, **fields), {}) as connection:
            yield connection

    @contextmanager
    def sent(self, path: str, body: Any, headers: Mapping[str, str]) -> Iterator[socket.socket]:
        """Sends a call and yields its socket, which is closed at the end."""
        data = json.dumps(body).encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.engine.port), timeout=WAIT_S) as connection:
            connection.sendall(head.encode() + data)
            yield connection


def generation(ids: Sequence[int], tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a call."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, **fields.pop("sampling", {})}
    return {"input_ids": list(ids), "sampling_params": sampling, **fields}


def rows(state: Mapping[str, Any], rid: str) -> list[dict[str, Any]]:
    """The generations with this id."""
    return [row for row in state["generations"] if row["rid"] == rid]


def until(read: Callable[[], Any], good: Callable[[Any], bool], what: str) -> Any:
    """Polls until a value is as wanted."""
    deadline = time.monotonic() + WAIT_S
    while not good(value := read()):
        assert time.monotonic() < deadline, f"never saw {what}; last: {value}"
        time.sleep(POLL_S)
    return value


def events(reply: Reply) -> list[Any]:
    """The decoded events of a stream; `[DONE]` stays a string."""
    assert reply.status == 200, reply.text
    parts = [part.removeprefix("data: ") for part in reply.text.strip().split("\n\n")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]
