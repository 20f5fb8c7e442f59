"""urllib3 pools whose connections are lent to exchanges."""

from __future__ import annotations

import queue
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from rolloutsync.transport.connection import TrackedHTTPConnection, TrackedHTTPSConnection, set_current_exchange

if TYPE_CHECKING:
    from rolloutsync.transport.connection import Tracked
    from rolloutsync.transport.exchange import Exchange


class _Stack(queue.LifoQueue[Any]):
    """A queue that never blocks, for pools that never do, without locks: each step is atomic."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        """Put on top; ``Full`` if there is no room, which two at once may exceed by one."""
        if len(self._items) >= self.maxsize:
            raise queue.Full
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002
        """Take from the top; ``Empty`` if nothing is there."""
        try:
            return self._items.pop()
        except IndexError:
            raise queue.Empty from None

    def top(self) -> Any:
        """As ``get``, but None if nothing is there, or only a free place, which stays one."""
        try:
            item = self._items.pop()
        except IndexError:
            return None
        if item is None:
            self._items.append(item)
        return item

    def put_back(self, item: Any) -> None:
        """Put on top what was there just now."""
        self._items.append(item)

    def qsize(self) -> int:
        """How many there are."""
        return len(self._items)


class _Lending(HTTPConnectionPool):
    """What both pools share: how they lend connections. A test pins the two private methods that this needs."""

    QueueCls = _Stack

    def lend(self, exchange: Exchange) -> Tracked:
        """A connection claimed for an exchange, connected or not; to be given back in any case.

        One that is not, learns from ``current_exchange`` for whom it connects.
        """
        stack = cast("_Stack | None", self.pool)  # None once the pool is closed
        kept: Tracked | None = stack.top() if stack is not None else None
        if stack is not None and kept is not None:
            if kept.claim(exchange):
                return kept
            stack.put_back(kept)
        set_current_exchange(exchange)
        return cast("Tracked", self._get_conn())

    def take_back(self, connection: Tracked) -> None:
        """The connection may serve another exchange; it is closed where the pool is full, or is closed itself."""
        self._put_conn(connection)


class DataPool(_Lending):
    """A pool of tracked connections."""

    ConnectionCls = TrackedHTTPConnection


class TLSPool(_Lending, HTTPSConnectionPool):
    """A pool of tracked TLS connections."""

    ConnectionCls = TrackedHTTPSConnection


POOL_CLASSES = {"http": DataPool, "https": TLSPool}
