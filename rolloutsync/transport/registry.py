"""The socket registry: every exchange and connection of one client, and the thread that ends them in time."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from rolloutsync.errors import Cut
from rolloutsync.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.transport.exchange import Exchange

_TICK_S = 0.25
_CROWD = 128
_FEW = 4


class Registry:
    """Knows each live exchange and each connection.

    Its thread runs while there is something to watch: four times a second it cuts exchanges that are past their
    deadline (this bounds drips and silences, which per-read timeouts do not) and closes idle sockets, so that a
    socket that nobody reuses does not stay in CLOSE_WAIT. Thread-safe.
    """

    def __init__(self, clock: Clock, name: str, idle_limit_s: float) -> None:
        self._clock = clock
        self.name = name
        self._idle_limit_s = idle_limit_s
        # _changed's lock guards: _connections, _thread, _closed. Never held across I/O or a cut. _exchanges needs none:
        # each use of it is one atomic step, and whoever enters looks at _thread and _closed after that, while those who
        # change these look at _exchanges after that, so that one of the two sees the other.
        self._changed = threading.Condition()
        self._exchanges: dict[int, Exchange] = {}
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False

    def enter(self, exchange: Exchange) -> None:
        """An exchange begins; it is cut at once if the client is closed."""
        self._exchanges[id(exchange)] = exchange
        if self._thread is None or self._closed:
            self._enter_first(exchange)

    def _enter_first(self, exchange: Exchange) -> None:
        with self._changed:
            closed = self._closed
            if self._thread is None and not closed:
                self._thread = self._try_start()
            exchange.watched = self._thread is not None
        if closed:
            exchange.cut(Cut.CLOSE)

    def _try_start(self) -> threading.Thread | None:
        """The thread; None where the system gives no more, and exchanges must time out by themselves."""
        try:
            return start_thread(self.name, self._run)
        except RuntimeError:
            return None

    @property
    def crowded(self) -> bool:
        """Whether so many exchanges are under way that their threads are let in a few at a time."""
        return len(self._exchanges) > _CROWD

    @property
    def few(self) -> bool:
        """Whether so few exchanges are under way that each is quickest in a thread of its own."""
        return len(self._exchanges) < _FEW

    def leave(self, exchange: Exchange) -> None:
        """An exchange has ended, well or not."""
        self._exchanges.pop(id(exchange), None)

    def add(self, connection: Any) -> None:
        """Learn of a connection; it is held weakly."""
        with self._changed:
            self._connections.add(connection)

    def cut(self, which: Callable[[Exchange], bool], reason: Cut) -> int:
        """Cut the exchanges that ``which`` picks; the number cut."""
        chosen = [exchange for exchange in self._exchanges.copy().values() if which(exchange)]
        return sum(exchange.cut(reason) for exchange in chosen)

    def close(self, timeout: float) -> list[str]:
        """Cut everything, close all idle sockets and end the thread; the names of threads that did not end."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        self.cut(lambda _: True, Cut.CLOSE)
        self._reap(limit_s=-1.0)
        if thread is None or thread is threading.current_thread():
            return []
        thread.join(timeout)
        return [thread.name] if thread.is_alive() else []

    def abandon(self) -> None:
        """In a forked child, where no other thread exists: close inherited descriptors, leave the parent's calls be."""
        for connection in list(self._connections):
            connection.abandon()

    def _run(self) -> None:
        watching = True
        while watching:
            with self._changed:
                self._clock.wait(self._changed, _TICK_S)
                if self._closed:
                    return
            self.cut(lambda exchange: exchange.deadline.expired, Cut.DEADLINE)
            open_sockets = self._reap(self._idle_limit_s)
            if not (self._exchanges or open_sockets):
                watching = self._goes_on()

    def _goes_on(self) -> bool:
        """The thread says that it ends, and goes on all the same where an exchange has entered that saw it."""
        with self._changed:
            self._thread = None
            if self._exchanges:
                self._thread = threading.current_thread()
            return self._thread is not None

    def _reap(self, limit_s: float) -> int:
        now = self._clock.monotonic()
        with self._changed:
            connections = list(self._connections)
        return sum([connection.reap(now, limit_s) for connection in connections])
