"""The front door of a simulated vLLM engine: what its API server and output processor do around the scheduler.

Unlike SGLang's it answers an abort itself, at once, with the tokens it has seen, even while the core hangs; it knows
requests by an outer id that may be there twice; and a pause is the core's business, which queues or refuses new ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.engine import Engine, Live
from rolloutsync.sim.jobs import Job
from rolloutsync.sim.ledger import Record
from rolloutsync.sim.replies import json_response
from rolloutsync.sim.request import ABORTED, Phase, SimRequest
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.vllm_errors import error

CORE_PAUSE_SINCE = (0, 17, 0)
REFUSAL_SINCE = (0, 33, 0)
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD_IN_SHORT = "The server had an error while processing your request."
PAUSED = "Generation is paused. Please retry after it resumes."
SETTLE_S = 0.02
MODES = ("abort", "wait", "keep")


@dataclass(frozen=True, kw_only=True)
class VllmJob(Job):
    """One generation that a call asks for; `rid` is the engine's inner id.

    Attributes:
        outer: The id that aborts know it by; all samples of a prompt share it.
        caller: What the caller called the request.
        sampling: Checked sampling parameters.
        limit: The most tokens that it can have.
        num_logprobs: Log-probabilities per output token besides its own, or None.
        num_prompt_logprobs: The same per prompt token.
    """

    outer: str
    caller: str
    sampling: Sampling
    limit: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(eq=False)
class VllmLive(Live):
    """A generation that is in flight."""

    outer: str = ""

    @property
    def running(self) -> bool:
        """Whether the scheduler has it and has not ended it."""
        request = self.record.request
        return request is not None and request.finish is None


class VllmEngine(Engine):
    """One simulated vLLM engine; used from its event loop alone."""

    roles = MappingProxyType(
        {
            "/inference/v1/generate": "/generate",
            "/v1/completions": "/generate",
            "/abort_requests": "/abort_request",
            "/inference/v1/abort_requests": "/abort_request",
            "/metrics": "/v1/loads",
            "/update_weights": "/update_weights_from_disk",
        }
    )
    paused_body = error(503, PAUSED).body

    def __init__(self, config: SimConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, clock)
        self.dead = False
        self.refusing = False
        self.kept = False
        self.transfer_ready = False
        self.updating = False
        self._ended = asyncio.Event()

    # Generations

    def _register(self, job: Job, *, stream: bool) -> Live:
        assert isinstance(job, VllmJob)
        live = VllmLive(Record(job.caller, len(job.prompt), ""), stream=stream, outer=job.outer)
        self.live[job.rid] = live
        self.ledger.records.append(live.record)
        return live

    def start(self, job: Job, sampling: Sampling, limit: int, on_done: Callable[[], None]) -> SimRequest:
        """Hands a generation to the scheduler."""

        def ended() -> None:
            self._ended.set()
            on_done()

        return super().start(job, sampling, limit, ended)

    async def admit(self) -> None:
        """Lets a call in; one that the core refuses hears of it when the core is alive to say so.

        Raises:
            ApiError: The engine is dead, or paused in a mode that takes nothing new.
        """
        self.check_alive()
        if self.refusing:
            await self.thawed()
        if self.refusing:
            raise error(503, PAUSED)

    def check_alive(self) -> None:
        """Checks that the core lives.

        Raises:
            ApiError: It is dead.
        """
        if self.dead:
            raise error(500, DEAD if self.config.release < REFUSAL_SINCE else DEAD_IN_SHORT)

    # Aborts

    @property
    def abortable(self) -> int:
        """How many things an abort of everything counts: each sample, and each prompt that has several."""
        outers = Counter(live.outer for live in self.live.values() if isinstance(live, VllmLive) and live.running)
        return sum(outers.values()) + sum(count > 1 for count in outers.values())

    def ignore_abort(self, call: Mapping[str, Any]) -> Response:
        """Answers an abort that a fault forgets."""
        ids = call.get("request_ids") or []
        self.ledger.saw_abort(ids, everything=not ids, ignored=True)
        return json_response({"status": "aborted", "aborted": len(ids) or self.abortable})

    def abort_outer(self, outer: Collection[str]) -> None:
        """Ends all generations with one of these outer ids; others are passed over in silence."""
        self._end(rid for rid, live in self.live.items() if isinstance(live, VllmLive) and live.outer in outer)

    def abort(self, rid: str, *, everything: bool) -> None:
        """Ends one generation by its inner id, or all."""
        self._end(each for each in self.live if everything or each == rid)

    def _end(self, rids: Iterable[str]) -> None:
        requests = [request for rid in rids if (request := self.live[rid].record.request) and request.finish is None]
        self.totals.aborts += len(requests)
        self.scheduler.cut(set(requests).__contains__)
        for request in requests:
            if request.finish is None:
                self._answer_early(request)
        self.tick()

    def _answer_early(self, request: SimRequest) -> None:
        """Answers for a core that hangs; the core drops the request once it lives again."""
        rank = self.scheduler.ranks[request.rank]
        if request.phase is Phase.RUNNING and not rank.paused:
            request.settle(self.scheduler.now, rank.step_s)
        request.stream.cut(request.count)
        request.finish, request.finished = ABORTED, self.scheduler.now
        request.on_done()

    # Pauses

    async def pause(self, mode: str, *, clear_cache: bool = True) -> None:
        """Pauses the core as a user does; with mode wait it blocks until all that is computed has ended."""
        await self.thawed()
        self.refusing = mode != "keep" and self.config.release >= REFUSAL_SINCE
        await self.halt(mode, clear_cache=clear_cache)
        await asyncio.sleep(SETTLE_S)

    async def halt(self, mode: str, *, clear_cache: bool) -> None:
        """Stops the core; whatever comes now is queued."""
        self.paused, self.kept = True, mode == "keep"
        self.scheduler.hold(on=True)
        if self.kept:
            self.scheduler.pause(retract=clear_cache and self.config.release >= CORE_PAUSE_SINCE)
        else:
            await self._drain(abort=mode == "abort")
        if clear_cache:
            self.scheduler.flush()
        self.tick()

    async def _drain(self, *, abort: bool) -> None:
        """Waits until nothing is computed; what waits in a queue stays there unless everything is aborted."""
        self.scheduler.resume()
        if abort:
            self.abort("", everything=True)
        self.tick()
        while any(rank.computing for rank in self.scheduler.ranks):
            self._ended.clear()
            await self._ended.wait()

    async def resume(self) -> None:
        """Ends a pause."""
        await self.thawed()
        self.paused = self.refusing = self.kept = False
        self.scheduler.resume()
        self.scheduler.hold(on=False)
        self.tick()

    def flush(self, *, preempt: bool) -> bool:
        """Empties the prefix caches, with everything that runs sent back to the queue first, if that is wanted."""
        if preempt:
            self.scheduler.pause(retract=True)
        done = self.scheduler.flush()
        if preempt and not self.kept:
            self.scheduler.resume()
        self.tick()
        return done

    async def update(self, apply: Callable[[], object]) -> None:
        """Runs a change of the weights between two steps of the core, whatever else goes on."""
        await self._apply(apply)

    # Dying

    def crash(self) -> None:
        """The core dies: what is in flight is answered with an error, and the server ends soon after."""
        if self.dead:
            return
        self.dead = True
        self.freeze()
        for live in self.live.values():
            if (request := live.record.request) is not None:
                request.on_done()
        self.exit_soon(self.config.death_delay_s)

    def start_over(self) -> None:
        """Also forgets whether it slept and what was said about weight transfers."""
        super().start_over()
        self.transfer_ready = self.updating = False
