"""What the asyncio peers share: one event loop, a semaphore, one task for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.work import Work
from benchmarks.peers.base import Answer, payloads, read


class AsyncPeer:
    """Subclasses say how one request is made."""

    new_loop = staticmethod(asyncio.new_event_loop)

    def __init__(self, work: Work) -> None:
        self._work = work
        self.retries = 0
        self._loop = self.new_loop()
        self._slots = asyncio.Semaphore(work.threads)
        self._loop.run_until_complete(self.open())

    def run(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """See ``Peer``."""
        return self._loop.run_until_complete(self._all(prompts))

    def close(self) -> None:
        """See ``Peer``."""
        self._loop.run_until_complete(self.shut())
        self._loop.close()

    async def _all(self, prompts: Sequence[list[int]]) -> list[Answer]:
        return await asyncio.gather(*(self._one(url, body) for url, body in payloads(self._work, prompts)))

    async def _one(self, url: str, body: dict[str, Any]) -> Answer:
        async with self._slots:
            return read(await self.post(f"{url}/generate", body), body["rid"], self._work.shape)

    async def open(self) -> None:
        """Make the client, inside the loop."""
        raise NotImplementedError

    async def shut(self) -> None:
        """Close the client."""
        raise NotImplementedError

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make one request; its parsed answer."""
        raise NotImplementedError
