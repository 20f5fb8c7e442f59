"""One exchange as it happens: what the connection tells about it, and how it is cut from outside."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from enum import Enum
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.errors import Cut, Phase

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator

    from rolloutsync.clock import Clock
    from rolloutsync.transport.registry import Registry
    from rolloutsync.transport.usher import Usher

_RACE_WINDOW_S = 1.0
_SLOT_TICK_S = 0.25
_LEAST_S = 0.001  # urllib3 refuses a timeout of zero
_LOCAL_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN}


class Lane(str, Enum):
    """An engine's two connection pools. Control calls never wait behind generates."""

    DATA = "data"
    CONTROL = "control"

    __hash__ = str.__hash__  # the enum's own takes a microsecond, and these are keys of each request


class CutError(OSError):
    """Raised inside the connection when the exchange was cut before it had a socket to shut down."""


class Exchange:
    """State of one request and its answer.

    Written by the threads that make it, one at a time; ``cut`` may be called by any thread.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        *,
        lane: Lane,
        engine: str,
        rid: str | None,
        deadline: Deadline,
        fresh: bool,
        connects: threading.BoundedSemaphore,
        connect_s: float,
        idle_limit_s: float,
    ) -> None:
        self.registry = registry
        self.clock = clock
        self.lane = lane
        self.engine = engine
        self.rid = rid
        self.deadline = deadline
        self.fresh = fresh
        self.idle_limit_s = idle_limit_s
        self._connects = connects
        self._connect_s = connect_s
        self.watched = True  # the registry's thread enforces the deadline
        self.usher: Usher | None = None  # lets the thread in when its answer has come; None: it asks the socket itself
        self.connection: Any = None  # the Tracked one in use
        self.reused = False
        self.sent_at: float | None = None
        self.broken_at: float | None = None  # where nobody waited for it; else it is now
        self.answered = False  # at least one byte of the answer was seen
        self.early = False  # and that before the whole request was sent
        self.connect_error: BaseException | None = None
        self.reason: Cut | None = None
        self._guard = threading.Lock()  # guards: _socket, _pins, reason. Held across shutdown(2), which never blocks.
        self._socket: socket.socket | None = None
        self._pins: list[io.RawIOBase] = []
        self._borrowed: tuple[Any, Any] | None = None  # (pool, connection), on the lean path
        self._twin: socket.socket | None = None  # of a socket in its TLS handshake

    # --- told by the connection ---

    def took(self, connection: Any, *, reused: bool) -> None:
        """The exchange now runs on this connection's socket; shut it at once if the cut came first."""
        self.connection, self.reused = connection, reused
        with self._guard:
            self._socket = connection.sock
            twin, self._twin = self._twin, None
            if self.reason is not None:
                self._shut_locked()
        if twin is not None:
            twin.close()

    def borrow(self, pool: Any) -> Any:
        """A connection of a pool, until the exchange ends."""
        connection = pool.lend(self)
        self._borrowed = pool, connection
        return connection

    def keep(self, pin: io.RawIOBase) -> None:
        """Keep the descriptor open until the exchange ends, so that a cut can never hit another socket."""
        with self._guard:
            self._pins.append(pin)

    @contextlib.contextmanager
    def connect_slot(self) -> Iterator[None]:
        """One of the engine's connect slots; waiting for it ends at the deadline and on a cut."""
        while not self._connects.acquire(timeout=_SLOT_TICK_S):
            self._check_uncut()
        try:
            self._check_uncut()
            yield
        finally:
            self._connects.release()

    def await_lookup(self, wait: Callable[[float], bool], host: str) -> None:
        """Block until ``wait`` says that the look-up of a name has ended.

        Raises:
            CutError: Cut, or the deadline came.
            TimeoutError: Not within the connect timeout.
        """
        until = Deadline.after(self.clock, self.connect_timeout())
        while not wait(until.within(_SLOT_TICK_S)):
            self._check_uncut()
            if until.expired:
                raise TimeoutError(f"the look-up of {host!r} has not ended")

    def connect(self, sock: socket.socket, address: Any) -> None:
        """Connect a socket that a cut can shut meanwhile, which ends the connect."""
        with self._guard:
            self._check_uncut()
            self._socket = sock
        try:
            sock.connect(address)
            self._check_uncut()
        finally:
            with self._guard:
                self._socket = None  # it may be closed from now on; took() tells which one is in use

    def shakes_hands(self, sock: socket.socket) -> None:
        """A cut ends the TLS handshake too: by a descriptor of our own, since the TLS layer takes the socket's over."""
        twin = sock.dup()
        with self._guard:
            self._twin, self._socket = twin, twin
            if self.reason is not None:
                self._shut_locked()

    def _check_uncut(self) -> None:
        if self.reason is not None or self.deadline.expired:
            raise CutError(errno.ECANCELED, "cut before it was connected")

    def connect_timeout(self) -> float:
        """Seconds for a connect that begins now."""
        return max(_LEAST_S, self.deadline.within(self._connect_s))

    def socket_timeout(self) -> float | None:
        """Per-call timeout for the socket: none on the data lane, where the registry enforces the whole deadline."""
        return None if self.lane is Lane.DATA and self.watched else self.time_left()

    def time_left(self) -> float:
        """Seconds until the deadline, as a timeout: never zero."""
        return max(_LEAST_S, self.deadline.within(86400.0))

    # --- from outside ---

    def cut(self, reason: Cut) -> bool:
        """Wake whoever blocks on this exchange's socket; False if it was already cut.

        The unbound ``socket.shutdown`` leaves a TLS layer in place, so that its reader fails instead of reading
        ciphertext as its body.
        """
        with self._guard:
            if self.reason is not None:
                return False
            self.reason = reason
            self._shut_locked()
            return True

    def _shut_locked(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # already disconnected by the other side
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # --- the end ---

    def end(self) -> None:
        """Deregister the socket, then let go of it."""
        with self._guard:
            self._socket = None
            pins, self._pins = self._pins, []
            twin, self._twin = self._twin, None
        if twin is not None:
            twin.close()
        for pin in pins:
            pin.close()
        if self.connection is not None:
            self.connection.settle(self)
        if self._borrowed is not None:
            (pool, connection), self._borrowed = self._borrowed, None
            pool.take_back(connection)

    def discard(self) -> None:
        """Make sure that the socket is not used again."""
        if self.connection is not None:
            self.connection.taint(self)

    def phase(self) -> Phase:
        """How far it had come when it broke."""
        if self.connection is None:
            return connect_phase(self.connect_error)
        if self.answered:
            return Phase.BODY
        if self.reason is not None:
            return Phase.SENT  # our own cut is never read as the keep-alive race
        now = self.clock.monotonic() if self.broken_at is None else self.broken_at
        lately = self.sent_at is None or now - self.sent_at <= _RACE_WINDOW_S
        return Phase.RACE if self.reused and lately else Phase.SENT


def connect_phase(error: BaseException | None) -> Phase:
    """The phase of a failed connect, by the errno that the kernel gave."""
    code = find_errno(error)
    if code == errno.ECONNREFUSED:
        return Phase.REFUSED
    return Phase.LOCAL if code in _LOCAL_ERRNOS else Phase.CONNECT


def find_errno(error: BaseException | None) -> int | None:
    """The innermost errno in a chain of wrapped exceptions.

    Not by ``__context__``: that may be the error of another exchange, which the caller is just handling.
    """
    found: int | None = None
    seen: set[int] = set()
    queue: list[Any] = [error]
    while queue:
        item = queue.pop()
        if not isinstance(item, BaseException) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, OSError) and item.errno is not None:
            found = item.errno
        queue += [item.__cause__, getattr(item, "reason", None), *item.args]
    return found
