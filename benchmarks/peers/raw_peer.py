"""The floor: threads with a socket each, hand-made requests, the same arrays at the end, and nothing else.

Expert ids become uint8 with their range checked, as in the client's default for a model of so many experts.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from benchmarks.harness.work import EXPERTS, Shape, Work
from benchmarks.peers.base import Answer, columns, payloads

_KEY = b'"routed_experts":"'
_END = b"\r\n\r\n"
_READ = 1 << 16
_STACK = 1 << 18

Call = tuple[int, str, dict[str, Any], "Wave"]


class Wave:
    """The answers of one run, and when all are there."""

    def __init__(self, count: int) -> None:
        self.answers: list[Any] = [None] * count
        self.error: BaseException | None = None
        self._arrived = itertools.count(1)
        self._all = threading.Event()

    def put(self, place: int, answer: Answer) -> None:
        """Thread-safe."""
        self.answers[place] = answer
        if next(self._arrived) == len(self.answers):
            self._all.set()

    def fail(self, error: BaseException) -> None:
        """Thread-safe."""
        self.error = error
        self._all.set()

    def wait(self) -> list[Answer]:
        """All answers, in order."""
        self._all.wait()
        if self.error is not None:
            raise self.error
        return self.answers


class RawPeer:
    """See the module."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._queues: list[SimpleQueue[Call | None]] = [SimpleQueue() for _ in work.urls[: work.threads]]
        threading.stack_size(_STACK)
        self._threads = [
            threading.Thread(target=self._worker, args=(work.urls[number % len(work.urls)], number), daemon=True)
            for number in range(work.threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """See ``Peer``."""
        wave = Wave(len(prompts))
        for place, (url, body) in enumerate(payloads(self._work, prompts)):
            self._queues[place % len(self._queues)].put((place, url, body, wave))
        return wave.wait()

    def close(self) -> None:
        """See ``Peer``."""
        for number in range(len(self._threads)):
            self._queues[number % len(self._queues)].put(None)
        for thread in self._threads:
            thread.join()

    def _worker(self, url: str, number: int) -> None:
        queue = self._queues[number % len(self._queues)]
        parts = urlsplit(url)
        head = request_head(parts.netloc, parts.path, self._work.headers)
        sock: socket.socket | None = None
        while (call := queue.get()) is not None:
            place, _, body, wave = call
            try:
                sock = sock or connect(str(parts.hostname), parts.port or 80)
                wave.put(place, exchange(sock, head, body, self._work.shape))
            except BaseException as error:  # noqa: BLE001 - the outermost frame; the waiting thread raises it
                wave.fail(error)
            del call, wave  # else it would keep all answers while it waits for the next request
        if sock is not None:
            sock.close()


def request_head(host: str, prefix: str, headers: Mapping[str, str]) -> str:
    """Of every request, up to the value of its Content-Length."""
    lines = [f"POST {prefix}/generate HTTP/1.1", f"Host: {host}", *(": ".join(pair) for pair in headers.items())]
    return "\r\n".join([*lines, "Content-Length: "])


def connect(host: str, port: int) -> socket.socket:
    """A connection that sends at once."""
    sock = socket.create_connection((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(sock: socket.socket, head: str, body: dict[str, Any], shape: Shape) -> Answer:
    """One request on a connection; its answer as arrays."""
    data = orjson.dumps(body)
    sock.sendall(f"{head}{len(data)}\r\n\r\n".encode() + data)
    return decode(receive(sock), body["rid"], shape)


def receive(sock: socket.socket) -> bytes | bytearray:
    """The body of one answer."""
    got = sock.recv(_READ)
    while (end := got.find(_END)) < 0:
        got = _more(got, sock)
    if not got.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"the engine answered {got[:end]!r}")
    size = int(got[got.index(b"content-length: ") + 16 :].split(b"\r", 1)[0])
    start = end + len(_END)
    if len(got) == start + size:
        return got[start:]
    body = bytearray(size)
    body[: len(got) - start] = got[start:]
    rest = memoryview(body)[len(got) - start :]
    while rest:
        rest = rest[sock.recv_into(rest) :]
    return body


def _more(got: bytes, sock: socket.socket) -> bytes:
    more = sock.recv(_READ)
    if not more:
        raise ConnectionError("the engine closed the connection")
    return got + more


def decode(body: bytes | bytearray, rid: str, shape: Shape) -> Answer:
    """The arrays in one body; experts straight from its bytes."""
    if not shape.layers:
        answer = orjson.loads(body)
        return Answer(rid, answer["meta_info"]["id"], *columns(answer), None)
    start = body.index(_KEY) + len(_KEY)
    stop = body.index(b'"', start)
    view = memoryview(body)
    answer = orjson.loads(bytes(view[:start]) + bytes(view[stop:]))
    rows = answer["meta_info"]["prompt_tokens"] + len(answer["output_ids"]) - 1
    experts = narrow(pybase64.b64decode(view[start:stop], validate=True)).reshape(rows, shape.layers, shape.topk)
    return Answer(rid, answer["meta_info"]["id"], *columns(answer), experts)


def narrow(raw: bytes) -> npt.NDArray[np.uint8]:
    """int32 ids as uint8, of the model's experts only."""
    ids = np.frombuffer(raw, np.uint32)  # a negative one becomes huge
    if ids.max() >= EXPERTS:
        raise ValueError("an expert that the model does not have")
    return ids.astype(np.uint8)


def make(work: Work) -> RawPeer:
    """See ``make_peer``."""
    return RawPeer(work)
