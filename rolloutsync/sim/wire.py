"""Faults on the wire: what stands between uvicorn and the routes, with the raw transport in its hands."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.faults import Fault
from rolloutsync.sim.generate import read_body
from rolloutsync.sim.replies import dumps, json_response

TRANSPORT = "sim.transport"
ERROR_BODY = {"error": {"message": "Something went wrong in the engine."}}
WRONG_ID = "0" * 32

Message = MutableMapping[str, Any]
Handler = Callable[["Exchange", Fault], Awaitable[None]]


class WireProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which lets the application see its transport."""

    def on_message_begin(self) -> None:
        """Puts the transport into the scope of every request."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[TRANSPORT] = self.transport


@dataclass
class Answer:
    """A whole answer, caught on its way out."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    async def send(self, message: Message) -> None:
        """Takes one ASGI message."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
        else:
            self.body += message.get("body", b"")

    def head(self) -> bytes:
        """Returns its header block with the true length of the body."""
        kept = [(name, value) for name, value in self.headers if name.lower() != b"content-length"]
        lines = [b"HTTP/1.1 %d %s" % (self.status, HTTPStatus(self.status).phrase.encode())]
        lines += [name + b": " + value for name, value in [*kept, (b"content-length", b"%d" % len(self.body))]]
        return b"\r\n".join(lines) + b"\r\n\r\n"


@dataclass
class Exchange:
    """One call that a fault hits."""

    app: ASGIApp
    scope: Scope
    body: bytes
    receive: Receive
    outer_send: Send

    @property
    def transport(self) -> asyncio.Transport:
        """The connection itself."""
        transport: asyncio.Transport = self.scope[TRANSPORT]
        return transport

    async def run(self, send: Send, *, attended: bool) -> None:
        """Runs the call; unattended, it never learns that its client has gone."""
        await self.app(self.scope, replayed(self.body, self.receive if attended else _forever), send)

    async def caught(self) -> Answer:
        """Runs the call and returns what it would have answered."""
        answer = Answer()
        await self.run(answer.send, attended=True)
        return answer

    def run_unattended(self) -> None:
        """Lets the call run on its own; nobody gets its answer."""
        task = asyncio.ensure_future(self.run(Answer().send, attended=False))
        _ORPHANS.add(task)
        task.add_done_callback(_ORPHANS.discard)

    async def send(self, response: Response) -> None:
        """Answers with something else."""
        await response(self.scope, self.receive, self.outer_send)

    async def send_answer(self, answer: Answer) -> None:
        """Answers with what was caught, or what became of it."""
        headers = [pair for pair in answer.headers if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        start: Message = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self.outer_send(start)
        await self.outer_send({"type": "http.response.body", "body": answer.body})

    async def gone(self) -> None:
        """Waits until the connection is closed by either side."""
        while not self.transport.is_closing():
            if (await self.receive())["type"] == "http.disconnect":
                return

    def reset(self) -> None:
        """Resets the connection."""
        peer = self.transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


_ORPHANS: set[asyncio.Future[None]] = set()


class FaultGate:
    """The outermost application: counts calls and lets the faults of an engine have their way with them."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call."""
        if scope["type"] != "http" or scope["path"].startswith("/sim/"):
            await self._app(scope, receive, send)
            return
        self._engine.ledger.calls[scope["path"]] += 1
        if self._engine.faults:
            await self._faulty(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _faulty(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, book, paused = scope["path"], self._engine.faults, self._engine.paused
        if (fault := book.take(path, None, early=True, paused=paused)) is not None:
            await answer_early(Exchange(self._app, scope, b"", receive, send), fault)
            return
        body = await read_body(receive)
        exchange = Exchange(self._app, scope, body, receive, send)
        fault = book.take(path, _call(scope, body) if book.needs_body() else None, early=False, paused=paused)
        if fault is None:
            await exchange.run(send, attended=True)
        elif fault.kind == "crash":
            await self._crash(exchange)
        elif fault.kind == "ignore_abort":
            await exchange.send(self._engine.ignore_abort(_decoded(exchange.body) or {}))
        elif fault.kind == "paused_503":
            await exchange.send(_given(fault, dict(self._engine.paused_body), 503))
        else:
            await HANDLERS[fault.kind](exchange, fault)

    async def _crash(self, exchange: Exchange) -> None:
        """Ends the process, at once or, where only the core dies, soon; the call sees what there is to see."""
        self._engine.crash()
        await exchange.run(exchange.outer_send, attended=True)


async def answer_early(exchange: Exchange, fault: Fault) -> None:
    """Answers while the client is still sending, then resets the connection."""
    response = _given(fault, None, fault.status or 413)
    head = Answer(response.status_code, list(response.raw_headers), bytes(response.body))
    exchange.transport.write(head.head() + head.body)
    await asyncio.sleep(fault.seconds)
    exchange.reset()


async def answer_status(exchange: Exchange, fault: Fault) -> None:
    """Answers with a status of its own."""
    if fault.after:
        await exchange.caught()
    await asyncio.sleep(fault.seconds)
    await exchange.send(_given(fault, {"error": {"message": "fault"}}, fault.status or 500))


async def hang(exchange: Exchange, fault: Fault) -> None:
    """Never answers."""
    if fault.after:
        exchange.run_unattended()
    await exchange.gone()


async def drop(exchange: Exchange, fault: Fault) -> None:
    """Closes the connection under a generation that goes on."""
    exchange.run_unattended()
    await asyncio.sleep(fault.seconds)
    exchange.transport.close()


async def reset(exchange: Exchange, fault: Fault) -> None:
    """Resets the connection before or after the call."""
    if fault.after:
        await exchange.caught()
    await asyncio.sleep(fault.seconds)
    exchange.reset()


async def truncate(exchange: Exchange, fault: Fault) -> None:
    """Sends a part of the body that it promises."""
    answer = await exchange.caught()
    exchange.transport.write(answer.head() + answer.body[: fault.bytes])
    exchange.transport.close()


async def drip(exchange: Exchange, fault: Fault) -> None:
    """Sends the answer little by little."""
    answer = await exchange.caught()
    data = answer.body
    if fault.headers_too:
        data = answer.head() + data
    else:
        exchange.transport.write(answer.head())
    size = max(1, fault.bytes)
    for start in range(0, len(data), size):
        if exchange.transport.is_closing():
            return
        exchange.transport.write(data[start : start + size])
        await asyncio.sleep(fault.seconds)
    exchange.transport.close()


async def delay(exchange: Exchange, fault: Fault) -> None:
    """Comes late."""
    if not fault.after:
        await asyncio.sleep(fault.seconds)
        await exchange.run(exchange.outer_send, attended=True)
        return
    answer = await exchange.caught()
    await asyncio.sleep(fault.seconds)
    await exchange.send_answer(answer)


async def interim(exchange: Exchange, fault: Fault) -> None:
    """Sends an informational answer before the real one."""
    status = HTTPStatus(fault.status or 103)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{key}: {text}" for key, text in fault.headers.items())]
    exchange.transport.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await exchange.run(exchange.outer_send, attended=True)


async def wrong_id(exchange: Exchange, fault: Fault) -> None:
    """Answers as if for another request."""
    answer = await exchange.caught()
    value = _decoded(answer.body)
    for item in value if isinstance(value, list) else [value]:
        _rename(item, WRONG_ID if fault.body is None else fault.body)
    answer.body = dumps(value)
    await exchange.send_answer(answer)


def _rename(item: Any, name: Any) -> None:
    """Gives an answer another id, where it has one."""
    holder = item.get("meta_info", item) if isinstance(item, dict) else None
    for key in ("id", "request_id"):
        if isinstance(holder, dict) and key in holder:
            holder[key] = name


async def error_200(exchange: Exchange, fault: Fault) -> None:
    """Answers 200 with what is no result."""
    await exchange.send(_given(fault, ERROR_BODY, 200))


HANDLERS: dict[str, Handler] = {
    "status": answer_status,
    "hang": hang,
    "drop": drop,
    "reset": reset,
    "truncate": truncate,
    "drip": drip,
    "delay": delay,
    "interim": interim,
    "wrong_id": wrong_id,
    "error_200": error_200,
}


def replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives a body that was read already, then whatever comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _forever() -> Message:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


def _given(fault: Fault, default: Any, status: int) -> Response:
    body = default if fault.body is None else fault.body
    if isinstance(body, str):
        return Response(body, status, dict(fault.headers), "text/plain")
    return json_response(body, status, dict(fault.headers))


def _call(scope: Scope, body: bytes) -> Any:
    """The decoded body, and the id that vLLM takes from a header."""
    call, name = _decoded(body), Headers(scope=scope).get("x-request-id")
    return call | {"request_id": name} if isinstance(call, dict) and name else call


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
