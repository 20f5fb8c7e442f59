"""`/v1/completions` and `/v1/chat/completions`: the same generation as `/generate`, in other words."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.generate import read_body
from rolloutsync.sim.openai_answer import Chunks, Json, Whole, whole_chat, whole_completion
from rolloutsync.sim.openai_request import BAD_REQUEST, OpenAIRequest, Parse, parse_chat, parse_completion
from rolloutsync.sim.replies import ApiError, dumps, json_response, loads_body, object_error
from rolloutsync.sim.sse import DONE, Events
from rolloutsync.sim.wire import Answer, replayed

Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Route:
    """What the two routes differ in."""

    path: str
    parse: Parse
    whole: Whole
    chat: bool


ROUTES = (
    Route("/v1/completions", parse_completion, whole_completion, chat=False),
    Route("/v1/chat/completions", parse_chat, whole_chat, chat=True),
)


class OpenAIEndpoint:
    """The ASGI application of one OpenAI route, around that of `/generate`."""

    def __init__(self, engine: Engine, generate: ASGIApp, route: Route) -> None:
        self._engine = engine
        self._generate = generate
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one call."""
        engine = self._engine
        try:
            body = loads_body(await read_body(receive), scope["path"])
            request = self._route.parse(body, engine.config, engine.model.tokenizer)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        inner = replayed(dumps(request.generate), receive)
        if request.stream:
            events = Chunked(Chunks(request, chat=self._route.chat), send)
            await self._generate(scope, inner, events.take)
            return
        answer = Answer()
        await self._generate(scope, inner, answer.send)
        await self._response(request, answer)(scope, receive, send)

    def _response(self, request: OpenAIRequest, answer: Answer) -> Response:
        if answer.status != 200:
            return refusal(answer.status, answer.body).response()
        value = orjson.loads(answer.body)
        return json_response(self._route.whole(request, value if isinstance(value, list) else [value]))


class Chunked:
    """Takes what `/generate` sends as a stream, and sends it on as OpenAI chunks.

    Nothing is sent before the first event: if that is an error, the answer is an error, and no stream.
    """

    def __init__(self, chunks: Chunks, send: Send) -> None:
        self._chunks = chunks
        self._send = send
        self._events = Events(send)
        self._status = 200
        self._over = False

    async def take(self, message: Message) -> None:
        """Takes one ASGI message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif not self._over:
            await self._take_body(message.get("body", b""))

    async def _take_body(self, data: bytes) -> None:
        event = data.removeprefix(b"data: ").strip()
        if self._status != 200:
            await self._refuse(refusal(self._status, data))
        elif event == DONE:
            await self._write_all(self._chunks.end())
            await self._end()
        elif event:
            await self._take_event(orjson.loads(event))

    async def _take_event(self, value: Json) -> None:
        reason = (value.get("meta_info") or {}).get("finish_reason") or {}
        if "error" in value and not self._events.started:
            await self._refuse(refusal(value["error"]["code"], dumps(value)))
        elif "error" in value:
            await self._fail(value["error"]["code"], value["error"]["message"], BAD_REQUEST)
        elif reason.get("status_code"):
            await self._fail(reason["status_code"], reason["message"], HTTPStatus(reason["status_code"]).name)
        else:
            await self._write_all(self._chunks.of(value))

    async def _refuse(self, error: ApiError) -> None:
        response = error.response()
        self._over = True
        headers = response.raw_headers
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _fail(self, status: int, message: str, kind: str) -> None:
        await self._write_all([{"error": object_error(status, message, kind).body}])
        await self._end()

    async def _end(self) -> None:
        self._over = True
        await self._events.end()

    async def _write_all(self, chunks: Iterable[Json]) -> None:
        for chunk in chunks:
            await self._events.send(dumps(chunk))


def refusal(status: int, body: bytes) -> ApiError:
    """Returns an error of `/generate` as the OpenAI routes put it."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return object_error(status, body.decode("utf-8", "replace"), "InternalServerError")
    error = value.get("error", value)
    if "object" in value:
        return ApiError(status, value)
    return object_error(status, error["message"] if isinstance(error, dict) else str(error), BAD_REQUEST)
