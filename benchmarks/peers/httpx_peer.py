"""httpx.AsyncClient the way async trainers set it up: limits as wide as the concurrency, no timeout, json.

They try again after a second whatever happened; without that, a run with thousands in flight ends now and then in a
``ReadError``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from benchmarks.harness.work import Work
from benchmarks.peers.loop import AsyncPeer

_TRIES = 60
_PAUSE_S = 1.0


class HttpxPeer(AsyncPeer):
    """See the module."""

    async def open(self) -> None:
        """See ``AsyncPeer``."""
        limits = httpx.Limits(max_connections=self._work.threads)
        self._client = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None), headers=self._work.headers)

    async def shut(self) -> None:
        """See ``AsyncPeer``."""
        await self._client.aclose()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """See ``AsyncPeer``."""
        for _ in range(_TRIES):
            try:
                return await self._once(url, body)
            except httpx.TransportError:
                self.retries += 1
                await asyncio.sleep(_PAUSE_S)
        return await self._once(url, body)

    async def _once(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post(url, json=body)
        response.raise_for_status()
        answer: dict[str, Any] = json.loads(response.text)
        return answer


def make(work: Work) -> HttpxPeer:
    """See ``make_peer``."""
    return HttpxPeer(work)
