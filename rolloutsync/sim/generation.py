"""One generation of a call: the request inside the scheduler and the event of its end."""

from __future__ import annotations

import asyncio

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.jobs import Job
from rolloutsync.sim.request import SimRequest
from rolloutsync.sim.sampling import Sampling


class Generation:
    """What both faces need of one generation; `done` is set once, when it has ended."""

    def __init__(self, engine: Engine, job: Job, sampling: Sampling, limit: int) -> None:
        self.job = job
        self.sampling = sampling
        self.done = asyncio.get_running_loop().create_future()
        self.request: SimRequest | None = None
        self._engine = engine
        self._limit = limit
        self._arrived = engine.now()

    def start(self) -> None:
        """Hands it to the scheduler."""
        self.request = self._engine.start(self.job, self.sampling, self._limit, self._on_done)

    def _on_done(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    @property
    def produced(self) -> int:
        """Tokens that there are now."""
        assert self.request is not None
        return self._engine.scheduler.produced(self.request)
