"""Server-sent events: how both faces send a stream."""

from __future__ import annotations

from typing import Any

from starlette.types import Send

from rolloutsync.sim.replies import dumps

DONE = b"[DONE]"


class Events:
    """One stream, whose headers go out with its first event."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def send(self, data: bytes) -> None:
        """Sends one event."""
        if not self.started:
            self.started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end(self) -> None:
        """Says that it is over, and ends it."""
        await self.send(DONE)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, body: Any) -> None:
        """Sends an error as the last event."""
        await self.send(dumps(body))
        await self.end()
