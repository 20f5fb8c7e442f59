"""One simulated engine as an HTTP server: routes, keys, and uvicorn around them."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import uuid
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolloutsync.sim import controls, sglang_routes, simroutes, vllm_routes
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.engine import Engine
from rolloutsync.sim.replies import ApiError, json_response
from rolloutsync.sim.routes import GET, POST, Table
from rolloutsync.sim.vllm_engine import VllmEngine
from rolloutsync.sim.wire import FaultGate, WireProtocol

KeyOf = Callable[[str], "str | None"]

OPEN_PREFIXES = ("/health", "/ready", "/metrics", "/sim/")
VLLM_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
VLLM_INFERENCE_GUARDED_SINCE = (0, 22, 0)


def make_app(engine: Engine) -> ASGIApp:
    """Returns the ASGI application of one engine."""
    table: Table[Engine] = Table(engine)
    table.add("/sim/state", simroutes.state, GET)
    table.add("/sim/reset", simroutes.reset, POST)
    table.add("/sim/faults", simroutes.faults, ("GET", "POST", "DELETE"))
    table.add("/sim/slow_down", controls.slow_down, POST)
    if isinstance(engine, VllmEngine):
        return FaultGate(_vllm_app(engine, table), engine)
    sglang_routes.add_routes(table)
    return FaultGate(KeyCheck(_starlette(table.routes), _sglang_key(engine.config, table.guarded)), engine)


def _vllm_app(engine: VllmEngine, shared: Table[Engine]) -> ASGIApp:
    table = Table(engine)
    vllm_routes.add_routes(table)
    app: ASGIApp = _starlette([*shared.routes, *table.routes])
    if engine.config.enable_request_id_headers:
        app = RequestIds(app)
    return KeyCheck(app, _vllm_key(engine.config))


def _starlette(routes: list[BaseRoute]) -> Starlette:
    return Starlette(routes=routes, exception_handlers={ApiError: _api_error, HTTPException: _http_error})


def _sglang_key(config: SimConfig, guarded: set[str]) -> KeyOf:
    def key_of(path: str) -> str | None:
        if path.startswith(OPEN_PREFIXES):
            return None
        return config.admin_api_key if path in guarded and config.admin_api_key else config.api_key

    return key_of


def _vllm_key(config: SimConfig) -> KeyOf:
    guarded = VLLM_GUARDED if config.release >= VLLM_INFERENCE_GUARDED_SINCE else VLLM_GUARDED[:1]
    return lambda path: config.api_key if path.startswith(guarded) else None


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": error.detail}, error.status_code, error.headers)


class KeyCheck:
    """Lets a call through only with the key that its path wants."""

    def __init__(self, app: ASGIApp, key_of: KeyOf) -> None:
        self._app = app
        self._key_of = key_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call."""
        if scope["type"] == "http" and not self._allows(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        wanted = self._key_of(scope["path"])
        if not wanted:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.decode("latin-1").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), wanted.encode())


class RequestIds:
    """Gives every answer the request's `X-Request-Id`, or one of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call."""

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = Headers(scope=scope).get("x-request-id", uuid.uuid4().hex)
                message["headers"] = [*message["headers"], (b"x-request-id", given.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, with_id)


def bind(config: SimConfig) -> socket.socket:
    """Returns a listening socket."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    listener.listen(config.backlog)
    listener.set_inheritable(False)
    return listener


async def serve(engine: Engine, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves one engine until SIGINT or SIGTERM, which lets running requests finish where the config says so."""
    config = uvicorn.Config(
        make_app(engine),
        http=WireProtocol,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=engine.config.keep_alive_s,  # type: ignore[arg-type]
        backlog=engine.config.backlog,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def leave(*, drain: bool) -> None:
        tasks.add(asyncio.ensure_future(_leave(engine, server, drain=drain)))

    drains = engine.config.drain_on_sigterm and not isinstance(engine, VllmEngine)
    loop.add_signal_handler(signal.SIGTERM, lambda: leave(drain=drains))
    loop.add_signal_handler(signal.SIGINT, lambda: leave(drain=False))
    await server.startup(sockets=[listener])
    on_ready()
    await server.main_loop()


async def _leave(engine: Engine, server: uvicorn.Server, *, drain: bool) -> None:
    engine.leaving = True
    if drain:
        await engine.drained()
    server.should_exit = True
