"""Exchanges: many at once, each with a thread that waits for it, or with the usher's."""

from __future__ import annotations

import errno
import http.client
import select
import threading
from typing import TYPE_CHECKING, Any

import requests
import urllib3

from rolloutsync.errors import Cut, Phase, TransportError
from rolloutsync.transport.budget import LARGE_BYTES, BodyBudget
from rolloutsync.transport.connection import set_current_exchange
from rolloutsync.transport.exchange import CutError, Exchange, Lane, connect_phase, find_errno
from rolloutsync.transport.lean import Answer, LeanPath, headers_of, length_of, read, send
from rolloutsync.transport.pending import Pending
from rolloutsync.transport.registry import Registry
from rolloutsync.transport.session import LaneAdapter, make_session, socket_options
from rolloutsync.transport.turns import Turns, one_at_a_time
from rolloutsync.transport.usher import Usher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from rolloutsync.clock import Clock, Deadline
    from rolloutsync.config import Timeouts
    from rolloutsync.transport.pending import Landed

_CONNECTS_AT_ONCE = {Lane.DATA: 56, Lane.CONTROL: 8}  # for each engine; a control call waits for no generate
_AT_ONCE_BYTES = 1 << 14  # the kernel takes so much on a connection that has nothing to send
_FOREIGN = (requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)


class Reply:
    """A whole answer. Leave its context when the body is decoded: that frees its share of the body budget."""

    __slots__ = ("_budget", "_exchange", "_head", "_reserved", "body", "status")

    def __init__(self, answer: Answer, exchange: Exchange, budget: BodyBudget) -> None:
        self.status, self._head, self.body, self._reserved = answer
        self._exchange = exchange
        self._budget = budget

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        reserved, self._reserved = self._reserved, 0
        if reserved:
            if isinstance(self.body, bytearray):
                self._budget.recycle(self.body)
            self.body = b""
            self._budget.release(reserved)

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers, in any case."""
        return headers_of(self._head)

    def distrust(self) -> None:
        """The answer was not ours: never use its socket again."""
        self._exchange.discard()


class Transport:
    """Makes exchanges over one shared session. Thread-safe.

    Args:
        clock: Time.
        timeouts: Connect and idle limits.
        pool_size: Connections kept for each engine and lane.
        budget_bytes: See ``RolloutClient(body_budget_bytes=)``.
        session: The user's, or None.
        name: Of the client, for thread names.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        timeouts: Timeouts,
        pool_size: int,
        budget_bytes: int,
        session: requests.Session | None,
        name: str,
    ) -> None:
        self._clock = clock
        self._timeouts = timeouts
        self._adapter = LaneAdapter(pool_size, socket_options(timeouts.half_open_s))
        self._session = make_session(session, self._adapter)
        self._lean = LeanPath(self._session, self._adapter, shared=session is not None)
        self._budget = BodyBudget(budget_bytes, clock)
        self._registry = Registry(clock, f"{name}-sockets", timeouts.idle_socket_s)
        self._usher = Usher(f"{name}-usher") if one_at_a_time() and hasattr(select, "epoll") else None
        self._turns = Turns()
        self._lock = threading.Lock()  # guards: _connects
        self._connects: dict[tuple[str, Lane], threading.BoundedSemaphore] = {}

    def exchange(
        self,
        *,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        lane: Lane,
        engine: str,
        deadline: Deadline,
        rid: str | None = None,
        fresh: bool = False,
    ) -> Reply:
        """Send one request and read its answer to the end. Blocks until then, at most until ``deadline``.

        Any error closes the connection. Nothing is retried here.

        Args:
            method: GET or POST.
            url: The whole URL.
            headers: Request headers.
            body: Request body, or None.
            lane: Which of the engine's pools to use.
            engine: The engine's base URL.
            deadline: For the whole exchange, connect included.
            rid: For cuts and errors.
            fresh: Use a new connection.

        Raises:
            TransportError: It broke; ``phase`` says how far it had come, ``cut`` whether we ended it.
        """
        made = self._make(lane, engine, deadline, rid, fresh=fresh)
        if deadline.expired:
            raise self._broken(made, CutError(errno.ECANCELED, "no time left"), f"{method} {url}")
        self._registry.enter(made)
        set_current_exchange(made)

        def answer() -> Answer:
            route = self._lean.route(method, url, headers, lane)
            if route is None:
                return self._send_plain(made, method, url, headers, body)
            connection = made.borrow(route.pool)
            if self._registry.crowded and made.watched and lane is Lane.DATA and not connection.speaks_tls:
                made.usher = self._usher
            send(connection, made, route, body)
            return self._receive(connection, made)

        return self._conclude(made, answer, method, url)

    def _conclude(self, made: Exchange, answer_of: Callable[[], Answer], *what: str) -> Reply:
        try:
            answer = answer_of()
            if answer.status == 101:
                made.discard()  # what follows on this socket is not HTTP
        except BaseException as error:
            made.discard()
            if isinstance(error, _FOREIGN):
                raise self._broken(made, error, " ".join(what)) from error
            raise
        finally:
            set_current_exchange(None)
            made.end()
            self._registry.leave(made)
        return Reply(answer, made, self._budget)

    # --- an exchange that no thread waits for ---

    def parks(self, url: str) -> bool:
        """Whether a request may be sent whose answer no thread waits for.

        Not where so few exchanges are under way that each is quickest in a thread of its own.
        """
        return self._usher is not None and not self._registry.few and not url.startswith("https:")

    def send_off(
        self,
        *,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        engine: str,
        deadline: Deadline,
        rid: str,
        relieve: Callable[[], None] | None,
    ) -> Pending | None:
        """Post a request on the data lane, and read its answer later, by ``finish``; arguments as for ``exchange``.

        Only where ``parks`` says so. Blocks while it connects or sends much, and calls ``relieve`` before. None:
        nothing was sent: no time is left, or only ``exchange`` can make this one, or that would block and there is no
        ``relieve``.
        """
        large = len(body) > _AT_ONCE_BYTES
        if deadline.expired or (large and relieve is None):
            return None
        route = self._lean.route("POST", url, headers, Lane.DATA)
        if route is None:
            return None
        made = self._make(Lane.DATA, engine, deadline, rid, fresh=False)
        pending = Pending(made, f"POST {url}")
        self._registry.enter(made)
        try:
            connection = made.borrow(route.pool)
            blocks = large or connection.sock is None
            if blocks and relieve is not None:
                set_current_exchange(made)
                relieve()
            if made.watched and (relieve is not None or not blocks):
                made.usher = self._usher
                send(connection, made, route, body)
                pending.connection = connection
        except Exception as error:  # noqa: BLE001 - finish() raises it: it may be sent, and must not be sent once more
            pending.error = error
        except BaseException:
            made.discard()
            raise
        finally:
            set_current_exchange(None)
            if pending.connection is None and pending.error is None:
                made.end()
                self._registry.leave(made)
        return None if pending.connection is None and pending.error is None else pending

    def park(self, pending: Pending, landed: Landed) -> bool:
        """Have the usher's thread read the answer; it calls ``landed(whole)``.

        Until then nobody else may touch ``pending``. ``whole``: it is whole and a success, so that ``finish`` does not
        block, as nothing in ``landed`` may. What that returns is called when all answers that came with this one have
        landed. False: ``finish`` it yourself.
        """
        if self._usher is None or pending.error is not None or pending.exchange.usher is None:
            return False
        return pending.park(self._usher, landed)

    def finish(self, pending: Pending) -> Reply:
        """Read what is left of an answer. Blocks and raises as ``exchange``."""
        made = pending.exchange
        if pending.answer is not None and made.reason is None:
            made.end()
            self._registry.leave(made)
            return Reply(pending.answer, made, self._budget)
        set_current_exchange(made)

        def answer() -> Answer:
            if pending.error is not None:
                raise pending.error
            return self._receive(pending.connection, made, pending.seen)

        return self._conclude(made, answer, pending.what)

    def _receive(self, connection: Any, made: Exchange, seen: bytes = b"") -> Answer:
        reserved = 0

        def reserve(size: int) -> int:
            nonlocal reserved
            reserved = self._reserve(made, size)
            return reserved

        try:
            answer = read(connection, made, reserve, self._budget.buffer, seen)
            if made.reason is not None:
                raise CutError(errno.ECANCELED, "cut while reading the answer")
        except BaseException:
            self._budget.release(reserved)
            raise
        return answer

    def _send_plain(
        self, made: Exchange, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        response = self._session.request(
            method,
            url,
            data=body,
            headers=dict(headers),
            timeout=self._timeouts_of(made, url),
            allow_redirects=False,
            stream=True,
        )
        try:
            size = self._reserve(made, length_of(response.headers))
        except BaseException:
            response.close()
            raise
        try:
            content = response.raw.read(decode_content=True) if response.raw is not None else response.content
            response.close()
            if made.reason is not None:
                raise CutError(errno.ECANCELED, "cut while reading the answer")
        except BaseException:
            self._budget.release(size)
            response.close()
            raise
        return Answer(response.status_code, response.headers, content or b"", size)

    def turn_for(self, reply: Reply) -> AbstractContextManager[object]:
        """Where to decode a reply: see ``Turns``."""
        return self._turns.of(len(reply.body))

    def _timeouts_of(self, made: Exchange, url: str) -> tuple[float, float | None]:
        """(connect, read); an adapter that is not ours knows nothing of cuts, so its reads must end by themselves."""
        ours = self._session.get_adapter(url) is self._adapter
        return made.connect_timeout(), made.socket_timeout() if ours else made.time_left()

    def _connects_of(self, engine: str, lane: Lane) -> threading.BoundedSemaphore:
        with self._lock:
            return self._connects.setdefault((engine, lane), threading.BoundedSemaphore(_CONNECTS_AT_ONCE[lane]))

    def _make(self, lane: Lane, engine: str, deadline: Deadline, rid: str | None, *, fresh: bool) -> Exchange:
        connects = self._connects.get((engine, lane)) or self._connects_of(engine, lane)
        return Exchange(
            self._registry,
            self._clock,
            lane=lane,
            engine=engine,
            rid=rid,
            deadline=deadline,
            fresh=fresh,
            connects=connects,
            connect_s=self._timeouts.connect_s,
            idle_limit_s=self._timeouts.idle_socket_s,
        )

    def _reserve(self, made: Exchange, size: int) -> int:
        """Block until the body may be in memory; how much of the budget that takes."""
        if size < LARGE_BYTES or made.lane is Lane.CONTROL:
            return 0
        if not self._budget.reserve(size, lambda: made.reason is not None):
            raise CutError(errno.ECANCELED, "cut while waiting to read the answer")
        return size

    def _broken(self, made: Exchange, error: BaseException, what: str) -> TransportError:
        phase, cut = _phase_of(made, error), _cut_of(made, error)
        cause = f"cut by us: {cut.value}" if cut else _innermost(error)
        message = f"{what}: {phase.value}: {cause}"
        return TransportError(message, engine=made.engine, rid=made.rid, phase=phase, cut=cut)

    def cut(self, which: Callable[[Exchange], bool], reason: Cut) -> int:
        """End the exchanges that ``which`` picks; they raise a TransportError with that ``cut``."""
        return self._registry.cut(which, reason)

    def close(self, timeout: float) -> list[str]:
        """Cut all exchanges, close all sockets, end the thread; the names of threads that did not end in time."""
        left = self._registry.close(timeout)
        left += self._usher.close(timeout) if self._usher is not None else []
        self._adapter.close()
        return left

    def abandon(self) -> None:
        """In a forked child: let go of everything inherited."""
        self._registry.abandon()
        if self._usher is not None:
            self._usher.abandon()


def _phase_of(made: Exchange, error: BaseException) -> Phase:
    if made.connection is not None or made.connect_error is not None:
        return made.phase()
    if isinstance(error, CutError):
        return Phase.CONNECT
    # no connection of ours took part: a mock, or an adapter that the user mounted
    refused = connect_phase(error) in {Phase.REFUSED, Phase.LOCAL}
    if refused or isinstance(error, requests.ConnectTimeout):
        return connect_phase(error)
    return Phase.SENT


def _cut_of(made: Exchange, error: BaseException) -> Cut | None:
    if made.reason is not None:
        return made.reason
    if made.deadline.expired:
        return Cut.DEADLINE
    if made.connect_error is not None:
        return None  # urllib3 calls a TLS handshake that hangs a read timeout
    timed_out = isinstance(error, (requests.ReadTimeout, urllib3.exceptions.ReadTimeoutError, TimeoutError))
    return Cut.DEADLINE if timed_out and find_errno(error) != errno.ETIMEDOUT else None


def _innermost(error: Any) -> str:
    """The error's own words, without the layers that requests and urllib3 put around them."""
    while True:
        wrapped = (getattr(error, "reason", None), *error.args, error.__cause__)
        inner = next((item for item in wrapped if isinstance(item, Exception)), None)
        if inner is None or not isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError)):
            return f"{type(error).__name__}: {error}"
        error = inner
