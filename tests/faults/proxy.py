"""A reverse proxy as async trainers have it before their engines: one ``httpx.AsyncClient``, its pool, no retries."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import TracebackType

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

STYLES = ("bare", "careful", "streaming")
_NOT_PASSED_ON = {"host", "connection", "transfer-encoding"}
_WAIT_S = 10.0


class Proxy:
    """Passes everything on to one engine; a context manager.

    Args:
        target: The engine's URL.
        style: What comes of an error: "bare" lets it rise (500), "careful" answers 502, "streaming" has begun its
            answer before the engine's has come, and breaks it off.
    """

    def __init__(self, target: str, style: str) -> None:
        self._target = target
        self._style = style
        self.errors: list[str] = []  # names of what httpx raised
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        routes = [Route("/{path:path}", self._pass_on, methods=["GET", "POST"])]
        app = Starlette(routes=routes, lifespan=self._life)
        config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_WAIT_S)
        self._listener.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as self._client:
            yield

    async def _pass_on(self, request: Request) -> Response:
        client = self._client
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED_ON}
        url = f"{self._target}{request.url.path}"
        made = client.build_request(request.method, url, content=await request.body(), headers=headers)
        if self._style == "streaming" and request.url.path == "/generate":
            return StreamingResponse(self._streamed(made), media_type="application/json")
        try:
            answer = await client.send(made)
        except httpx.HTTPError as error:
            self.errors.append(type(error).__name__)
            if self._style == "careful":
                return Response(f"{type(error).__name__} at {url}", 502)
            raise
        return Response(answer.content, answer.status_code)

    async def _streamed(self, made: httpx.Request) -> AsyncIterator[bytes]:
        try:
            answer = await self._client.send(made, stream=True)
            async with aclosing(answer.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except httpx.HTTPError as error:
            self.errors.append(type(error).__name__)
            raise
