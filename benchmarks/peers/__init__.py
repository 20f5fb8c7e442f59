"""The clients that are compared. Each is imported only where it runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness.work import Work
    from benchmarks.peers.base import Peer

OURS = "ours"
RAW = "raw"
AIOHTTP = "aiohttp"
HTTPX = "httpx"
REQUESTS = "requests"
PEERS = {
    OURS: "RolloutClient.generate",
    AIOHTTP: "aiohttp.ClientSession and orjson",
    "uvloop": "the same on uvloop; runs where it is asked for",
    HTTPX: "httpx.AsyncClient and json, as async trainers set it up",
    REQUESTS: "ThreadPoolExecutor over a requests.Session",
    RAW: "the floor: plain sockets in threads",
}


def make_peer(work: Work) -> Peer:
    """The peer that ``work`` names, ready to run."""
    if work.peer not in PEERS:
        raise ValueError(f"peer must be one of {', '.join(PEERS)}, got {work.peer!r}")
    module = import_module(f"benchmarks.peers.{work.peer}_peer")
    peer: Peer = module.make(work)
    return peer
