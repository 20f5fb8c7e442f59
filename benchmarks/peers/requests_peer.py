"""A thread pool over one requests.Session whose pool is as wide as the concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from benchmarks.harness.work import Work
from benchmarks.peers.base import Answer, payloads, read


class RequestsPeer:
    """See the module."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(work.threads)
        self._session = requests.Session()
        self._session.headers.update(work.headers)
        self._session.mount("http://", HTTPAdapter(pool_connections=len(work.urls), pool_maxsize=work.threads))

    def run(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """See ``Peer``."""
        return list(self._pool.map(self._one, payloads(self._work, prompts)))

    def _one(self, call: tuple[str, dict[str, Any]]) -> Answer:
        url, body = call
        response = self._session.post(f"{url}/generate", json=body)  # as users do, without a timeout
        response.raise_for_status()
        return read(response.json(), body["rid"], self._work.shape)

    def close(self) -> None:
        """See ``Peer``."""
        self._pool.shutdown()
        self._session.close()


def make(work: Work) -> RequestsPeer:
    """See ``make_peer``."""
    return RequestsPeer(work)
