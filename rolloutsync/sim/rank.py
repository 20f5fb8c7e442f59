"""One data-parallel rank: its queues, its batch and its clockwork.

A rank is advanced from event to event (an arrival, the end of a prefill, a request's last token); between two events
every number is a function of the time, so that no work is done per token. All times are scheduler seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rolloutsync.sim.cache import PrefixCache
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.loads import Load, Snapshots
from rolloutsync.sim.prefill import Prefill
from rolloutsync.sim.request import ABORTED, ABORTED_IN_QUEUE, QUEUE_FULL, Phase, Refusal, SimRequest
from rolloutsync.sim.timeouts import RAN_TOO_LONG, WAITED_TOO_LONG, Timeouts

LOOK_AHEAD_TOKENS = 256
HEADROOM_TOKENS = 16
Match = Callable[[SimRequest], bool]


class Rank:
    """The scheduler of one rank. Not thread-safe."""

    def __init__(self, config: SimConfig, index: int, now: float) -> None:
        self.index = index
        self.cache = PrefixCache(config.max_total_tokens)
        self.waiting: deque[SimRequest] = deque()
        self.prefill = Prefill(config.chunked_prefill_size, config.prefill_tokens_per_second)
        self.running: dict[int, SimRequest] = {}
        self.paused = False
        self.holding = False
        self._retracted = 0
        self.peak_running = 0
        self.busy_s = 0.0
        self._config = config
        self._timeouts = Timeouts(config)
        self._now = now
        self._extra_s = 0.0
        self._paused_at = 0.0
        self._arriving: deque[SimRequest] = deque()
        self._due: list[tuple[float, int, SimRequest]] = []
        self._reserved = 0
        self._hit_rate = 0.0
        self._prefilled_tokens = 0
        self._prefill_busy_s = 0.0
        self._decoded_s = 0.0
        self.snapshots = Snapshots(Load(at=now), config.load_lag_s)

    @property
    def step_s(self) -> float:
        """Seconds per decode step."""
        return 1.0 / self._config.tokens_per_second + self._extra_s

    @property
    def computing(self) -> bool:
        """Whether anything is prefilled or decoded, paused or not."""
        return bool(self.running or self.prefill)

    @property
    def idle(self) -> bool:
        """Whether nothing is here at all."""
        return not (self.computing or self.waiting or self._arriving)

    # Requests

    def submit(self, request: SimRequest, now: float) -> None:
        """Takes a request, or answers at once that the queue is full."""
        self.advance(now)
        limit = self._config.max_queued_requests
        if limit is not None and len(self.waiting) + len(self._arriving) >= limit:
            self._refuse(request, now, QUEUE_FULL)
            return
        request.rank = self.index
        request.arrives = now + self._config.dispatch_s
        self._arriving.append(request)

    def abort(self, match: Match, now: float) -> None:
        """Ends what matches: queued ones at once, running ones with the next step, prefills between two passes."""
        self.advance(now)
        self._end_matching(match, now)
        for request in filter(match, self.prefill.requests):
            self.prefill.abort(request)
        for request in self.running.values():
            if match(request) and request.cut_at is None:
                request.settle(self._clock(now), self.step_s)
                request.end_soon()
                self._plan(request)
        self._publish_if_idle(now)

    def cut(self, match: Match, now: float) -> None:
        """Ends what matches at once, in whatever phase, with all the tokens that it has."""
        self.advance(now)
        self._end_matching(match, now)
        for request in list(filter(match, self.prefill.requests)):
            self.prefill.remove(request)
            self._reserved -= len(request.prompt) + request.stream.limit
            self._end_queued(request, now)
        for request in list(filter(match, self.running.values())):
            request.settle(self._clock(now), self.step_s)
            self._leave(request, now, ABORTED)
        self._admit(now)
        self._publish_if_idle(now)

    def _end_matching(self, match: Match, now: float) -> None:
        for queue in (self._arriving, self.waiting):
            for request in list(filter(match, queue)):
                queue.remove(request)
                self._end_queued(request, now)

    # Control

    def hold(self, on: bool, now: float) -> None:
        """Lets nothing out of the queue any more, or again; what has left it goes on."""
        self.advance(now)
        self.holding = on
        self._admit(now)

    def pause(self, *, retract: bool, now: float) -> None:
        """Stops the clockwork; with `retract`, everything goes back to the waiting queue."""
        self.advance(now)
        if not self.paused:
            self.paused, self._paused_at = True, now
        if retract:
            self._retract([*self.running.values(), *self.prefill.drop()], self._paused_at)

    def resume(self, now: float) -> None:
        """Goes on where `pause` stopped."""
        self.advance(now)
        if not self.paused:
            return
        lost = now - self._paused_at
        self.paused = False
        self._end_matching(lambda request: request.aborted, now)  # in a prefill that was given up
        self.prefill.end += lost
        self.snapshots.phase = now
        for request in self.running.values():
            request.since += lost
            self._plan(request)
        self._admit(now)

    def slow_down(self, extra_s: float, now: float) -> None:
        """Makes every step this much longer."""
        self.advance(now)
        for request in self.running.values():
            request.settle(self._clock(now), self.step_s)
        self._extra_s = extra_s
        for request in self.running.values():
            self._plan(request)

    def flush(self, now: float) -> bool:
        """Empties the prefix cache unless something needs it; returns whether it did."""
        self.advance(now)
        if self.computing or not (self.paused or self.holding or self.idle):
            return False
        self.cache.clear()
        return True

    def change_weights(self, version: str, now: float) -> None:
        """Lets all later tokens come from other weights."""
        self.advance(now)
        for request in self.running.values():
            request.settle(self._clock(now), self.step_s)
        for request in [*self._arriving, *self.waiting, *self.prefill.requests, *self.running.values()]:
            request.stream.change_weights(version, request.count)
        for request in self.running.values():
            self._plan(request)

    # The clockwork

    def _clock(self, now: float) -> float:
        """The time that decoding has come to: it stands still in a pause."""
        return self._paused_at if self.paused else now

    def next_event(self) -> float | None:
        """Returns when `advance` has something to do, or None."""
        times = [self._arriving[0].arrives if self._arriving else None, self._timeouts.waiting_end(self.waiting)]
        if not self.paused:
            times += [self._timeouts.running_end(self.running.values()), self._next_due(), self._full_at()]
            times.append(self.prefill.end if self.prefill.running else None)
        return min((at for at in times if at is not None), default=None)

    def advance(self, now: float) -> None:
        """Does everything that is due up to `now`."""
        while (at := self.next_event()) is not None and at <= now:
            at = max(at, self._now)
            self._pass_to(at)
            self._do(at)
        self._pass_to(max(now, self._now))

    def _do(self, at: float) -> None:
        while self._arriving and self._arriving[0].arrives <= at:
            self._arriving[0].queued_at = at
            self.waiting.append(self._arriving.popleft())
        for request in self._timeouts.waited(self.waiting, at):
            self.waiting.remove(request)
            self._refuse(request, at, WAITED_TOO_LONG)
        if self.paused:
            return
        if self.prefill.running and self.prefill.end <= at:
            self._end_prefill(at)
        while (due := self._next_due()) is not None and due <= at:
            self._reach(heapq.heappop(self._due)[2], at)
        for request in self._timeouts.ran(self.running.values(), at):
            request.settle(at, self.step_s)
            self._leave(request, at, RAN_TOO_LONG)
        if (full := self._full_at()) is not None and full <= at:
            self._retract([max(self.running.values(), key=lambda request: request.serial)], at)
        self._admit(at)
        self._publish_if_idle(at)

    def _pass_to(self, at: float) -> None:
        passed = at - self._now
        if passed > 0 and self.computing and not self.paused:
            self.busy_s += passed
            self._decoded_s += passed if self.running else 0.0
        self._now = at
        self._publish_upto(at)

    def _admit(self, at: float) -> None:
        if self.paused or self.prefill.running:
            return
        if not self.holding:
            self._fill_prefill(at)
        if self.prefill:
            taken, busy = self.prefill.start(at, self._extra_s)
            self._prefilled_tokens += taken
            self._prefill_busy_s += busy
            self.peak_running = max(self.peak_running, len(self.running) + len(self.prefill.requests))
            self.snapshots.write(self.measure(at))

    def _fill_prefill(self, at: float) -> None:
        room, used = self._config.max_running_requests - len(self.running), self.used_tokens(at)
        admitted = self.prefill.requests
        while self.waiting and len(admitted) < room and self.prefill.has_room:
            request = self.waiting[0]
            headroom = HEADROOM_TOKENS * (len(self.running) + len(admitted))
            if used and used + request.size + headroom > self._config.max_total_tokens:
                return
            used += request.size
            self._begin(self.waiting.popleft(), at)

    def _begin(self, request: SimRequest, at: float) -> None:
        cached = self._cached_of(request)
        if not request.retractions:
            request.cached_tokens, request.entered_at = cached, at
        request.phase, request.to_prefill = Phase.PREFILL, request.size - cached
        self._hit_rate = cached / request.size
        self._reserved += len(request.prompt) + request.stream.limit
        self.prefill.requests.append(request)

    def _cached_of(self, request: SimRequest) -> int:
        most = request.size - 1 if request.reuse_limit is None else min(request.size - 1, request.reuse_limit)
        cached = min(self.cache.match(request.stream.prefixes(request.count)), most)
        return cached - cached % self._config.block_size

    def _end_prefill(self, at: float) -> None:
        done, aborted = self.prefill.finish()
        for request in aborted:
            self._reserved -= len(request.prompt) + request.stream.limit
            self._end_queued(request, at)
        for request in done:
            self._begin_decoding(request, at)
            self._plan(request)

    def _begin_decoding(self, request: SimRequest, at: float) -> None:
        self.cache.add(request.stream.prefixes(request.count)[1 + request.cached_tokens :])
        request.begin_decoding(at)
        self.running[request.serial] = request

    def _plan(self, request: SimRequest) -> None:
        stream = request.stream
        if request.cut_at is not None:
            request.target = request.cut_at
        elif stream.runs_free:
            request.target = stream.limit
        else:
            stream.grow(request.count + LOOK_AHEAD_TOKENS)
            request.target = len(stream.tokens)
        request.due = request.since + (request.target - request.count) * self.step_s
        heapq.heappush(self._due, (request.due, request.serial, request))

    def _next_due(self) -> float | None:
        while self._due:
            due, _, request = self._due[0]
            if request.phase is Phase.RUNNING and request.due == due:
                return due
            heapq.heappop(self._due)
        return None

    def _reach(self, request: SimRequest, at: float) -> None:
        request.count, request.since = request.target, at
        stream = request.stream
        if request.cut_at is not None:
            self._leave(request, at, ABORTED)
        elif stream.stop is not None and request.count >= len(stream.tokens):
            self._leave(request, at, {"type": "stop", "matched": stream.stop.matched})
        elif request.count >= stream.limit:
            self._leave(request, at, {"type": "length", "length": request.count})
        else:
            self._plan(request)

    def _leave(self, request: SimRequest, at: float, finish: dict[str, Any] | Refusal) -> None:
        del self.running[request.serial]
        self._reserved -= len(request.prompt) + request.stream.limit
        request.stream.cut(request.count)
        self.cache.add(request.stream.hashes(request.count)[1:])
        self._end(request, at, finish)

    def _end_queued(self, request: SimRequest, at: float) -> None:
        """Ends what is not decoded: only the tokens that were reported to the front door are left of it."""
        request.while_queued = True
        request.count -= request.count % self._config.report_interval
        request.stream.cut(request.count)
        self._end(request, at, ABORTED_IN_QUEUE)

    def _refuse(self, request: SimRequest, at: float, refusal: Refusal) -> None:
        """Refuses what waits, or would have to."""
        request.while_queued = True
        self._end(request, at, refusal)

    def _end(self, request: SimRequest, at: float, finish: dict[str, Any] | Refusal) -> None:
        request.phase, request.finished, request.finish = Phase.DONE, at, finish
        request.on_done()

    def _retract(self, requests: Iterable[SimRequest], at: float) -> None:
        """Sends requests back to the queue; those that an abort has marked end with the step under way."""
        first = self._config.dialect == "vllm"  # where SGLang lets them queue up behind the others
        for request in reversed([*requests]) if first else requests:
            request.settle(at, self.step_s)
            if request.cut_at is not None:
                if request.phase is Phase.PREFILL:
                    self._begin_decoding(request, at)
                self._leave(request, at, ABORTED)
                continue
            if self.running.pop(request.serial, None) is not None:
                request.retractions, self._retracted = request.retractions + 1, self._retracted + 1
            self._reserved -= len(request.prompt) + request.stream.limit
            request.stream.cut(request.count)
            request.phase, request.queued_at = Phase.WAITING, at
            self.waiting.insert(0 if first else len(self.waiting), request)

    def _full_at(self) -> float | None:
        """When the KV cache will be full, if it will."""
        capacity = self._config.max_total_tokens
        if self._reserved <= capacity or len(self.running) < 2:
            return None
        free = capacity - self.used_tokens(self._now)
        return self._now + max(0, free // len(self.running)) * self.step_s

    # Loads

    def used_tokens(self, now: float) -> int:
        """Returns how many tokens the KV cache holds for requests that are computed."""
        at = self._clock(now)
        decoded = sum(len(request.prompt) + request.produced(at, self.step_s) for request in self.running.values())
        return decoded + self.prefill.used_tokens

    def measure(self, now: float) -> Load:
        """Returns the load at `now`; what is being prefilled shows in the token counts alone."""
        used = self.used_tokens(now)
        return Load(
            at=now,
            running=len(self.running),
            prefilling=len(self.prefill.requests),
            waiting=len(self.waiting),
            waiting_uncached_tokens=sum(request.size - self._cached_of(request) for request in self.waiting),
            used_tokens=used,
            total_tokens=used + sum(request.size for request in self.waiting),
            throughput=0.0 if self.paused else len(self.running) / self.step_s,
            hit_rate=self._hit_rate,
            prefilled_tokens=self._prefilled_tokens,
            prefill_busy_s=self._prefill_busy_s,
            decode_steps=int(self._decoded_s / self.step_s),
            retracted=self._retracted,
        )

    def _publish_upto(self, at: float) -> None:
        if self.paused or (self.holding and not self.computing):
            return
        every, idle_s = self._config.load_publish_interval, self._config.load_idle_interval_s
        period = self.step_s * every if self.computing else idle_s
        if (due := self.snapshots.due(at, period)) is not None:
            self.snapshots.write(self.measure(due))

    def _publish_if_idle(self, at: float) -> None:
        if not self.paused and not self.computing and self.snapshots.newest_at < at:
            self.snapshots.write(self.measure(at))
