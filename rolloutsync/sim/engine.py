"""The front door of the simulated engine: what stands between the HTTP routes and the scheduler.

Like the real tokenizer manager it keeps the live request ids, parks requests during a pause, serialises pauses, holds
new requests back during a weight update, and decides which aborts reach the scheduler. All of it on one event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from rolloutsync.sim.answers import Answers
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.faults import FaultBook
from rolloutsync.sim.jobs import Job
from rolloutsync.sim.ledger import Ledger, Record
from rolloutsync.sim.replies import value_error
from rolloutsync.sim.request import SimRequest
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.scheduler import Scheduler
from rolloutsync.sim.stream import TokenStream, model_of
from rolloutsync.sim.totals import Totals
from rolloutsync.sim.weights import Weights

ABORT_ONCE_SINCE = (0, 5, 20)
DEATH_CODE = 17
SHORTEST_CHUNK_S = 0.004


@dataclass(eq=False)
class Live:
    """A request id that is in use."""

    record: Record
    stream: bool = False
    abort_sent: bool = False


class Engine:
    """One simulated engine; used from its event loop alone.

    Attributes:
        roles: Paths that are this engine's for what others have under another name; see `Fault.path`.
        paused_body: What a fault says that pretends a pause.
    """

    roles: Mapping[str, str] = MappingProxyType({})
    paused_body: Any = MappingProxyType({"code": "paused", "message": "Generation is paused.", "retryable": True})

    def __init__(self, config: SimConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.model = model_of(config.vocab_size, config.mean_output_tokens)
        self.answers = Answers(config, self.model)
        self.scheduler = Scheduler(config, clock)
        self.weights = Weights()
        self.faults = FaultBook(self.freeze, self.thaw, self.roles)
        self.ledger = Ledger()
        self.totals = Totals()
        self.live: dict[str, Live] = {}
        self.paused = False
        self.released: set[str] = set()
        self.session_open = False
        self.groups: set[str] = set()
        self.leaving = False
        self.healthy = True
        self.in_flight = 0
        self._clock = clock
        self._wall_offset = time.time() - clock()
        self._updating = False
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._pause_lock = asyncio.Lock()
        self._update_lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    # Time

    def wall(self, scheduler_time: float) -> float:
        """Turns scheduler time into seconds since the epoch."""
        return scheduler_time + self.scheduler.lost_s + self._wall_offset

    def now(self) -> float:
        """Clock time in seconds."""
        return self._clock()

    @property
    def pace(self) -> float:
        """Seconds between two looks of a stream for new tokens."""
        return max(SHORTEST_CHUNK_S, self.scheduler.ranks[0].step_s / 2)

    def tick(self) -> None:
        """Lets the scheduler catch up, and sets the alarm for its next event."""
        self.scheduler.advance()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.scheduler.next_event()
        if at is not None:
            delay = max(0.0, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self.tick)

    def start_over(self) -> None:
        """Forgets what the control plane was told, as after a start; only while nothing is in flight."""
        self.scheduler.advance()
        self.scheduler.change_weights(self.config.weight_version)
        self.scheduler.flush()
        self.weights = Weights()
        self.groups.clear()
        self.released.clear()
        self.session_open = False

    # Generations

    def register(self, asked: Iterable[Job], *, stream: bool = False) -> list[Live]:
        """Takes the request ids of one call.

        Raises:
            ApiError: One of them is in use.
        """
        wanted = list(asked)
        for job in wanted:
            if job.rid in self.live:
                raise value_error(f"Duplicate request ID detected: {job.rid}")
        return [self._register(job, stream=stream) for job in wanted]

    def _register(self, job: Job, *, stream: bool) -> Live:
        live = Live(Record(job.rid, len(job.prompt), ""), stream=stream)
        self.live[job.rid] = live
        self.ledger.records.append(live.record)
        return live

    def forget(self, asked: Iterable[Job]) -> None:
        """Frees the request ids of one call."""
        for job in asked:
            live = self.live.pop(job.rid)
            self.totals.ended(live.record.request, stream=live.stream)
            live.record.close()

    async def enter(self) -> None:
        """Waits out pauses and weight updates, then counts the caller as in flight until `leave`."""
        while not self._open.is_set():
            await self._open.wait()
        self.in_flight += 1
        self._empty.clear()

    def leave(self) -> None:
        """Ends what `enter` began."""
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()

    def start(self, job: Job, sampling: Sampling, limit: int, on_done: Callable[[], None]) -> SimRequest:
        """Hands a generation of at most `limit` tokens to the scheduler."""
        request = self._request(job.rid, job, sampling, limit, on_done)
        record = self.live[job.rid].record
        record.request, record.prompt_hash = request, f"{request.stream.prompt_hash:016x}"
        self._submit(request)
        return request

    def warm(self, job: Job, sampling: Sampling, on_done: Callable[[], None]) -> None:
        """Computes a prompt that several samples will share; no id of the caller's reaches it."""
        self._submit(self._request(uuid.uuid4().hex, job, sampling, 0, on_done))

    def _request(self, rid: str, job: Job, sampling: Sampling, limit: int, on_done: Callable[[], None]) -> SimRequest:
        stream = TokenStream(self.model, job.prompt, sampling, limit, self.scheduler.weight_version)
        reuse = job.logprob_start if job.logprob and job.logprob_start >= 0 else None
        return SimRequest(rid, job.prompt, stream, on_done, dp_rank=job.dp_rank, reuse_limit=reuse)

    def _submit(self, request: SimRequest) -> None:
        self.scheduler.submit(request)
        self.tick()

    # Aborts

    def abort(self, rid: str, *, everything: bool) -> None:
        """What `/abort_request` does: only a live id gets through, and then takes all that start with it along."""
        if everything:
            self.totals.aborts += 1
            self.scheduler.abort(lambda _: True)
        elif rid and self._may_abort(rid):
            self.totals.aborts += 1
            self.scheduler.abort(lambda request: request.rid.startswith(rid))
        self.tick()

    def _may_abort(self, rid: str) -> bool:
        live = self.live.get(rid)
        if live is None or (live.abort_sent and self.config.release >= ABORT_ONCE_SINCE):
            return False
        live.abort_sent = True
        return True

    def disconnected(self, job: Job) -> None:
        """Aborts a generation whose client has gone, unless an abort was sent already."""
        live = self.live.get(job.rid)
        if live is not None and (request := live.record.request) is not None and request.finish is None:
            live.record.disconnected = True
            self.abort(job.rid, everything=False)

    def ignore_abort(self, call: Mapping[str, Any]) -> Response:
        """Answers an abort that a fault forgets."""
        rid = str(call.get("rid") or "")
        self.ledger.saw_abort([rid] if rid else [], everything=bool(call.get("abort_all")), ignored=True)
        return Response()

    # Pauses

    async def pause(self, mode: str) -> None:
        """Pauses; in mode abort only once everything in flight is answered."""
        async with self._pause_lock:
            self.paused = True
            self._open.clear()
            if mode != "abort":
                self.scheduler.pause(retract=mode == "retract")
                self.tick()
                return
            while True:
                self.abort("", everything=True)
                if not self.in_flight:
                    return
                await asyncio.sleep(self.config.pause_poll_s)

    async def resume(self) -> None:
        """Ends a pause, whoever began it."""
        async with self._pause_lock:
            self.paused = False
            self.scheduler.resume()
            self.tick()
            self._open_unless_held()

    def _open_unless_held(self) -> None:
        if not self.paused and not self._updating:
            self._open.set()

    async def update(self, apply: Callable[[], object]) -> None:
        """Runs a weight update: at once in a pause, else when nothing is in flight, with new requests held back."""
        async with self._update_lock:
            if self.paused:
                await self._apply(apply)
                return
            self._updating = True
            self._open.clear()
            try:
                await self._empty.wait()
                await self._apply(apply)
            finally:
                self._updating = False
                self._open_unless_held()

    async def _apply(self, apply: Callable[[], object]) -> None:
        await self.thawed()
        await asyncio.sleep(self.config.update_s)
        self.scheduler.advance()
        apply()
        self.tick()

    # Freezing and dying

    def freeze(self) -> None:
        """Hangs the scheduler."""
        self.scheduler.freeze()
        self._thawed.clear()
        self.tick()

    def thaw(self) -> None:
        """Ends a freeze."""
        self.scheduler.thaw()
        self._thawed.set()
        self.tick()

    async def thawed(self) -> None:
        """Waits until the scheduler is not frozen."""
        while self.scheduler.frozen:
            await self._thawed.wait()

    def die(self, delay_s: float) -> None:
        """Hangs at once and ends the process a little later, as when a scheduler process crashes."""
        self.freeze()
        self.exit_soon(delay_s)

    def exit_soon(self, delay_s: float) -> None:
        """Ends the process a little later."""
        asyncio.get_running_loop().call_later(delay_s, os._exit, DEATH_CODE)

    def crash(self) -> None:
        """Ends the process."""
        os._exit(DEATH_CODE)

    async def drained(self) -> None:
        """Waits until nothing is in flight."""
        await self._empty.wait()
