"""What the transport tests share: a transport of small limits, one call in a line, and calls in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import requests

from rolloutsync.clock import Clock, Deadline
from rolloutsync.config import Timeouts
from rolloutsync.errors import TransportError
from rolloutsync.transport import Lane, Transport
from rolloutsync.transport.budget import BodyBudget
from tests.background import in_thread

T = TypeVar("T")
CLOCK = Clock()
DEADLINE_S = 10.0


def make_transport(
    *, session: requests.Session | None = None, budget_bytes: int = 1 << 30, **timeouts: float
) -> Transport:
    return Transport(
        clock=CLOCK,
        timeouts=Timeouts(**timeouts),
        pool_size=256,
        budget_bytes=budget_bytes,
        session=session,
        name="rolloutsync-test",
    )


class Caller:
    """Calls one engine over one transport."""

    def __init__(self, transport: Transport, url: str) -> None:
        self.transport = transport
        self.url = url

    def post(self, body: bytes = b"{}", path: str = "/generate", **options: Any) -> bytes:
        """The answer's body."""
        return self.full(body, path, **options)[1]

    def full(
        self,
        body: bytes | None = b"{}",
        path: str = "/generate",
        *,
        lane: Lane = Lane.DATA,
        seconds: float = DEADLINE_S,
        rid: str | None = None,
        fresh: bool = False,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of the answer."""
        with self.transport.exchange(
            method="GET" if body is None else "POST",
            url=self.url + path,
            headers=headers or {},
            body=body,
            lane=lane,
            engine=self.url,
            deadline=Deadline.after(CLOCK, seconds),
            rid=rid,
            fresh=fresh,
        ) as reply:
            return reply.status, bytes(reply.body)

    def fails(self, **options: Any) -> TransportError:
        """The error of a call that must break."""
        try:
            status, body = self.full(**options)
        except TransportError as error:
            return error
        raise AssertionError(f"the call did not break: {status} {body!r:.80}")


def reservations(budget: BodyBudget) -> list[int]:
    """What is reserved after each reservation from now on."""
    seen: list[int] = []
    reserve = budget.reserve

    def watched(size: int, given_up: Callable[[], bool]) -> bool:
        got = reserve(size, given_up)
        seen.append(budget._reserved)
        return got

    budget.reserve = watched  # type: ignore[method-assign]
    return seen


def all_at_once(calls: Iterable[Callable[[], T]]) -> list[Future[T]]:
    """Runs calls in threads that start together."""
    made = list(calls)
    barrier = threading.Barrier(len(made))

    def together(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    return [in_thread(lambda call=call: together(call)) for call in made]  # type: ignore[misc]
