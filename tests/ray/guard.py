"""The guard on threads, for tests beside Ray, which opens and keeps sockets to its processes as it pleases."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from tests.conftest import SETTLE_S, our_threads


def watch_threads(name: str) -> Iterator[None]:
    """Fails the test of this name if it leaves a thread of ours behind; the body of a fixture."""
    threads = our_threads()
    yield
    deadline = time.monotonic() + SETTLE_S
    while (left := our_threads() - threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    if left:
        pytest.fail(f"{name} left behind: {', '.join(sorted(left))}")
