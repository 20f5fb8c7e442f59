"""aiohttp with orjson on uvloop's event loop, as in Ray's async actors. Runs where it is asked for by name."""

from __future__ import annotations

import uvloop

from benchmarks.harness.work import Work
from benchmarks.peers.aiohttp_peer import AiohttpPeer


class UvloopPeer(AiohttpPeer):
    """See the module."""

    new_loop = staticmethod(uvloop.new_event_loop)


def make(work: Work) -> UvloopPeer:
    """See ``make_peer``."""
    return UvloopPeer(work)
