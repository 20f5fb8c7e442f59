"""A request whose answer no thread waits for: the usher's thread reads it as it comes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from rolloutsync.transport.lean import FIRST_READ, Answer, whole_answer

if TYPE_CHECKING:
    from rolloutsync.transport.exchange import Exchange
    from rolloutsync.transport.usher import Usher


Landed = Callable[[bool], Optional[Callable[[], None]]]  # noqa: UP045 - evaluated on 3.10 too


class Pending:
    """A request that was sent. One thread at a time has it: who sent it, the usher's, or who finishes it.

    Attributes:
        exchange: Its state.
        what: Method and URL, for errors.
        connection: On which it was sent; None where that failed.
        error: Why sending or reading has failed.
        seen: What has come of the answer.
        answer: The whole of it.
    """

    __slots__ = ("_landed", "_usher", "answer", "connection", "error", "exchange", "seen", "what")

    def __init__(self, exchange: Exchange, what: str) -> None:
        self.exchange = exchange
        self.what = what
        self.connection: Any = None
        self.error: Exception | None = None
        self.seen = b""
        self.answer: Answer | None = None
        self._usher: Usher | None = None
        self._landed: Landed | None = None

    def park(self, usher: Usher, landed: Landed) -> bool:
        """Leave it to the usher's thread, see ``Transport.park``."""
        self._usher, self._landed = usher, landed
        return usher.park(self.connection.sock.fileno(), self)

    def look(self) -> bool:
        """Something has come: read it. False: it is parked again. Called by the usher's thread; does not block."""
        return not (
            self._reads_more() and self._usher is not None and self._usher.park(self.connection.sock.fileno(), self)
        )

    def leave(self) -> Callable[[], None] | None:
        """The usher's thread has done what it can; what is left for it to do then."""
        landed, self._landed, self._usher = self._landed, None, None
        self.exchange.usher = None  # whoever reads on asks the socket itself: its last edge is spent
        return None if landed is None else landed(self.answer is not None and 200 <= self.answer.status < 300)

    def _reads_more(self) -> bool:
        """Read all there is, as one edge may stand for it; whether the rest is short, and worth waiting for."""
        more = True
        while more:
            try:
                chunk = self.connection.sock.recv(FIRST_READ, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError as error:
                self.error, chunk = error, b""
            if not chunk:
                self.exchange.broken_at = self.exchange.clock.monotonic()
                return False
            self.exchange.answered = True
            self.seen = self.seen + chunk if self.seen else chunk
            self.answer, more = whole_answer(self.seen)
        return False
