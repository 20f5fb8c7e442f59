"""One simulated engine as an HTTP server: routes, keys, and uvicorn around them."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rolloutsync.sim import controls, infos, loadviews, simroutes, weightroutes
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.engine import Engine
from rolloutsync.sim.generate import GenerateEndpoint
from rolloutsync.sim.openai import ROUTES, OpenAIEndpoint
from rolloutsync.sim.replies import ApiError, json_response
from rolloutsync.sim.wire import FaultGate, WireProtocol

Handler = Callable[[Engine, Request], Awaitable[Response]]

ALWAYS = (0, 0, 0)
NEVER = (99, 0, 0)
GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")
OPEN_PREFIXES = ("/health", "/ready", "/metrics", "/sim/")


class Table:
    """Collects the routes that an engine of this version has."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.routes: list[BaseRoute] = []
        self.guarded: set[str] = set()

    def add(
        self,
        path: str,
        handler: Handler,
        methods: tuple[str, ...],
        *,
        since: tuple[int, int, int] = ALWAYS,
        until: tuple[int, int, int] = NEVER,
        guarded: bool = False,
    ) -> None:
        """Adds a route of the versions from `since` and before `until`; `guarded` ones want the admin key."""
        if not since <= self._engine.config.release < until:
            return

        async def endpoint(request: Request) -> Response:
            return await handler(self._engine, request)

        self.routes.append(Route(path, endpoint, methods=list(methods)))
        if guarded:
            self.guarded.add(path)


def make_app(engine: Engine) -> ASGIApp:
    """Returns the ASGI application of one engine."""
    table = Table(engine)
    generate = GenerateEndpoint(engine)
    table.routes.append(Route("/generate", generate, methods=["POST", "PUT"]))
    for route in ROUTES:
        table.routes.append(Route(route.path, OpenAIEndpoint(engine, generate, route), methods=["POST"]))
    _add_infos(table)
    _add_controls(table)
    _add_weights(table)
    if engine.config.enable_metrics:
        _add_metrics(table)
    for path, handler, methods in (
        ("/sim/state", simroutes.state, GET),
        ("/sim/reset", simroutes.reset, POST),
        ("/sim/faults", simroutes.faults, ("GET", "POST", "DELETE")),
    ):
        table.add(path, handler, methods)
    app = Starlette(routes=table.routes, exception_handlers={ApiError: _api_error, HTTPException: _http_error})
    return FaultGate(KeyCheck(app, engine.config, table.guarded), engine)


def _add_infos(table: Table) -> None:
    table.add("/", infos.root, GET, since=infos.ROOT_SINCE)
    table.add("/model_info", infos.model_info, GET, since=(0, 5, 6))
    table.add("/get_model_info", infos.model_info, GET)
    table.add("/server_info", infos.server_info, GET, since=(0, 5, 6))
    table.add("/get_server_info", infos.server_info, GET)
    table.add("/v1/models", infos.models, GET)
    table.add("/v1/models/{model:path}", infos.model, GET)
    table.add("/get_weight_version", infos.weight_version, GET, since=(0, 5, 1), until=(0, 5, 21))
    table.add("/weight_version", infos.weight_version, GET, since=(0, 5, 6), until=(0, 5, 21))
    table.add("/health", infos.health, GET)
    table.add("/health_generate", infos.health, GET)
    table.add("/ping", infos.ping, GET)
    table.add("/ready", infos.ready, GET, since=(0, 5, 20))
    table.add("/v1/loads", loadviews.v1_loads, GET, since=(0, 5, 8))
    table.add("/get_load", loadviews.get_load, GET, since=(0, 4, 7), until=(0, 5, 21))


def _add_controls(table: Table) -> None:
    table.add("/abort_request", controls.abort, POST, guarded=True)
    table.add("/pause_generation", controls.pause, POST, since=(0, 4, 9), guarded=True)
    table.add("/continue_generation", controls.resume, POST, since=(0, 4, 9), guarded=True)
    table.add("/flush_cache", controls.flush, BOTH, guarded=True)
    table.add("/release_memory_occupation", controls.release_memory, BOTH, guarded=True)
    table.add("/resume_memory_occupation", controls.resume_memory, BOTH, guarded=True)
    table.add("/slow_down", controls.slow_down, BOTH, guarded=True)


def _add_weights(table: Table) -> None:
    table.add("/update_weights_from_disk", weightroutes.from_disk, POST, guarded=True)
    table.add("/update_weights_from_tensor", weightroutes.from_tensor, POST, guarded=True)
    table.add("/update_weights_from_distributed", weightroutes.from_distributed, POST, guarded=True)
    table.add("/weights_checker", weightroutes.checker, BOTH, guarded=True)
    table.add("/begin_weight_update", weightroutes.begin, POST, since=weightroutes.SESSION_SINCE, guarded=True)
    table.add("/end_weight_update", weightroutes.end, POST, since=weightroutes.SESSION_SINCE, guarded=True)
    table.add("/init_weights_update_group", weightroutes.init_group, POST, guarded=True)
    table.add("/destroy_weights_update_group", weightroutes.destroy_group, POST, since=(0, 5, 4), guarded=True)
    table.add("/update_weight_version", weightroutes.set_version, POST, since=(0, 5, 1), guarded=True)


def _add_metrics(table: Table) -> None:
    from rolloutsync.sim.metrics import metrics  # noqa: PLC0415 - only who wants metrics needs prometheus-client

    table.add("/metrics", metrics, GET)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": error.detail}, error.status_code, error.headers)


class KeyCheck:
    """Lets a call through only with the key that its path wants."""

    def __init__(self, app: ASGIApp, config: SimConfig, guarded: set[str]) -> None:
        self._app = app
        self._api_key = config.api_key
        self._admin_key = config.admin_api_key
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call."""
        if scope["type"] == "http" and not self._allows(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        path = scope["path"]
        wanted = self._admin_key if path in self._guarded and self._admin_key else self._api_key
        if not wanted or path.startswith(OPEN_PREFIXES):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.decode("latin-1").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), wanted.encode())


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

    loop.add_signal_handler(signal.SIGTERM, lambda: leave(drain=engine.config.drain_on_sigterm))
    loop.add_signal_handler(signal.SIGINT, lambda: leave(drain=False))
    await server.startup(sockets=[listener])
    on_ready()
    await server.main_loop()


async def _leave(engine: Engine, server: uvicorn.Server, *, drain: bool) -> None:
    engine.leaving = True
    if drain:
        await engine.drained()
    server.should_exit = True
