"""A table of routes, each of which some versions have and others do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from rolloutsync.sim.engine import Engine

E = TypeVar("E", bound=Engine)

ALWAYS = (0, 0, 0)
NEVER = (99, 0, 0)
GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")


class Table(Generic[E]):
    """Collects the routes that an engine of this version has."""

    def __init__(self, engine: E) -> None:
        self.engine = engine
        self.routes: list[BaseRoute] = []
        self.guarded: set[str] = set()

    def add(
        self,
        path: str,
        handler: Callable[[E, Request], Awaitable[Response]],
        methods: tuple[str, ...],
        *,
        since: tuple[int, int, int] = ALWAYS,
        until: tuple[int, int, int] = NEVER,
        guarded: bool = False,
    ) -> None:
        """Adds a route of the versions from `since` and before `until`; `guarded` ones want the admin key."""
        if not since <= self.engine.config.release < until:
            return

        async def endpoint(request: Request) -> Response:
            return await handler(self.engine, request)

        self.routes.append(Route(path, endpoint, methods=list(methods)))
        if guarded:
            self.guarded.add(path)

    def mount(self, path: str, app: ASGIApp, methods: tuple[str, ...]) -> None:
        """Adds an application of its own."""
        self.routes.append(Route(path, app, methods=list(methods)))
