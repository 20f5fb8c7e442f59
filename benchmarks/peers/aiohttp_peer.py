"""aiohttp with orjson on both ways."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from benchmarks.harness.work import Work
from benchmarks.peers.loop import AsyncPeer


class AiohttpPeer(AsyncPeer):
    """See the module."""

    async def open(self) -> None:
        """See ``AsyncPeer``."""
        connector = aiohttp.TCPConnector(limit=self._work.threads)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def shut(self) -> None:
        """See ``AsyncPeer``."""
        await self._session.close()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """See ``AsyncPeer``."""
        async with self._session.post(url, data=orjson.dumps(body), headers=self._work.headers) as response:
            response.raise_for_status()
            answer: dict[str, Any] = orjson.loads(await response.read())
            return answer


def make(work: Work) -> AiohttpPeer:
    """See ``make_peer``."""
    return AiohttpPeer(work)
