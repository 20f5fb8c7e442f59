"""Engines that cost next to nothing: one process, one port for each, answers made beforehand.

    python -m benchmarks.harness.load_server '{"engines": 4, "engine_s": 1.0}'

Prints its ports as JSON and serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvloop

from benchmarks.harness.answers import RID_CHARS, Answer, generate_answer, loads, plain_answer, server_info
from benchmarks.harness.process import raise_file_limit
from benchmarks.harness.work import Shape

HOST = "127.0.0.1"
BACKLOG = 4096
_SMALL = 1 << 16
_END = b"\r\n\r\n"


@dataclass
class Board:
    """What all connections of one engine share."""

    answer: Answer
    engine_s: float
    model_path: str
    held: dict[Connection, bytes] = field(default_factory=dict)  # ids of requests whose time is not up
    plain: dict[bytes, Callable[[], bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info, ok = plain_answer(server_info(self.model_path)), plain_answer({"success": True})
        model = plain_answer({"weight_version": "default", "model_path": self.model_path})
        self.plain = {
            b"/v1/loads": lambda: plain_answer(loads(len(self.held), time.time())),
            b"/server_info": lambda: info,
            b"/model_info": lambda: model,
            b"/health": lambda: ok,
            b"/abort_request": lambda: ok,
            b"/bench/release": self.release,
        }
        self.missing = plain_answer({}).replace(b"200 OK", b"404 Not Found")

    def release(self) -> bytes:
        """Answer everything at once, whatever its time."""
        held = list(self.held)
        for connection in held:
            connection.answer()
        return plain_answer({"released": len(held)})


class Connection(asyncio.Protocol):
    """One keep-alive connection; its requests come one after the other."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._loop = asyncio.get_running_loop()
        self._got = b""
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self in self._board.held:
            self._done()

    def data_received(self, data: bytes) -> None:
        self._got = self._got + data if self._got else data
        while (request := self._next()) is not None:
            self._serve(*request)

    def _next(self) -> tuple[bytes, bytes] | None:
        """(head, body) of a request that is complete."""
        end = self._got.find(_END)
        if end < 0:
            return None
        head, size = self._got[:end], end + len(_END)
        size += content_length(head)
        if len(self._got) < size:
            return None
        body, self._got = self._got[end + len(_END) : size], self._got[size:]
        return head, body

    def _serve(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        board = self._board
        if path != b"/generate":
            self._transport.write(board.plain.get(path, lambda: board.missing)())
            return
        board.held[self] = rid_of(body)
        if board.engine_s:
            self._timer = self._loop.call_later(board.engine_s, self.answer)
        else:
            self.answer()

    def answer(self) -> None:
        """Answer the request that is held."""
        rid, answer = self._done(), self._board.answer
        if len(answer.after) < _SMALL:
            self._transport.write(answer.small(rid))
        else:  # uvloop keeps a reference to what the kernel does not take at once
            self._transport.write(answer.before + rid)
            self._transport.write(answer.after)

    def _done(self) -> bytes:
        """Its time is up; the id of the request."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        return self._board.held.pop(self)


def content_length(head: bytes) -> int:
    """Of a request; 0 where it does not say."""
    start = head.lower().find(b"content-length:")
    return 0 if start < 0 else int(head[start + 15 :].split(b"\r", 1)[0])


def rid_of(body: bytes) -> bytes:
    """The request's id in its JSON, however its writer spaces it."""
    start = body.index(b'"', body.index(b'"rid"') + 5) + 1
    rid = body[start : start + RID_CHARS]
    if body[start + RID_CHARS : start + RID_CHARS + 1] != b'"':
        raise ValueError(f"the load server wants a rid of {RID_CHARS} characters, got {rid!r}")
    return rid


async def serve(engines: int, engine_s: float, shape: Shape, model_path: str) -> None:
    """Serve until standard input closes."""
    loop = asyncio.get_running_loop()
    answer = generate_answer(shape)
    ports = []
    for _ in range(engines):
        board = Board(answer, engine_s, model_path)
        server = await loop.create_server(partial(Connection, board), HOST, 0, backlog=BACKLOG)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    raise_file_limit()
    options = json.loads(sys.argv[1])
    shape = Shape(**options.get("shape", {}))
    uvloop.run(serve(options["engines"], options.get("engine_s", 0.0), shape, options.get("model_path", "")))


if __name__ == "__main__":
    main()
