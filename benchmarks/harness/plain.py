"""A plain script's control calls: one at a time, as short as can be."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

_POLL_S = 0.01
_AWAIT_S = 120.0


class Control:
    """A connection to one engine, for the thread that made it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60.0)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Its JSON, None where the answer is empty."""
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = self._connection.getresponse().read()
        return json.loads(answer) if answer.strip() else None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def running(self) -> tuple[int, int]:
        """(running, waiting) by the engine's own word."""
        ranks = self.call("GET", "/v1/loads")["loads"]
        return sum(rank["num_running_reqs"] for rank in ranks), sum(rank["num_waiting_reqs"] for rank in ranks)

    def abort_until_zero(self) -> float:
        """Abort all; seconds until nothing runs or waits."""
        began = time.perf_counter()
        self.call("POST", "/abort_request", {"abort_all": True})
        await_true(lambda: self.running() == (0, 0))
        return time.perf_counter() - began


def await_true(condition: Callable[[], bool]) -> None:
    """Block until it holds.

    Raises:
        TimeoutError: It never did.
    """
    until = time.monotonic() + _AWAIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not so within {_AWAIT_S:g} s")
        time.sleep(_POLL_S)


def await_running(urls: Sequence[str], count: int) -> None:
    """Block until so many requests run over all engines."""
    controls = [Control(url) for url in urls]
    await_true(lambda: sum(control.running()[0] for control in controls) >= count)


def abort_all(urls: Sequence[str]) -> list[float]:
    """Abort all engines at once; seconds of each."""
    took = [0.0] * len(urls)

    def one(place: int, url: str) -> None:
        took[place] = Control(url).abort_until_zero()

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(urls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took
