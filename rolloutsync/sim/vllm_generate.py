"""vLLM's two generation endpoints: whole answers and streams, and the client that goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.generate import client_gone, read_body
from rolloutsync.sim.generation import Generation
from rolloutsync.sim.replies import ApiError, dumps, json_response
from rolloutsync.sim.sse import Events
from rolloutsync.sim.tokenizer import Tokenizer
from rolloutsync.sim.vllm_answers import CompletionAnswers, Piece, TokenAnswers
from rolloutsync.sim.vllm_engine import VllmEngine, VllmJob
from rolloutsync.sim.vllm_errors import LateError, plain_error
from rolloutsync.sim.vllm_request import Call, json_of

Parse = Callable[[Any, Headers, SimConfig, Tokenizer], Call]


@dataclass(frozen=True)
class Form:
    """What the two endpoints differ in."""

    parse: Parse
    answers: TokenAnswers | CompletionAnswers


class VllmEndpoint:
    """The ASGI application of one of them."""

    def __init__(self, engine: VllmEngine, form: Form) -> None:
        self._engine = engine
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one call."""
        headers, body = Headers(scope=scope), await read_body(receive)
        try:
            call = self._parsed(body, headers)
        except ApiError as error:
            in_stream = isinstance(error, LateError) and json_of(body).get("stream")
            await (Events(send).fail(error.body) if in_stream else error.response()(scope, receive, send))
            return
        self._engine.register(call.jobs, stream=call.stream)
        await self._engine.enter()
        try:
            await self._serve(call, scope, receive, send)
        finally:
            self._engine.leave()
            self._engine.forget(call.jobs)

    def _parsed(self, body: bytes, headers: Headers) -> Call:
        _check_type(headers)
        return self._form.parse(json_of(body), headers, self._engine.config, self._engine.model.tokenizer)

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        samples = Samples(self._engine, call)
        stream = Stream(self._form.answers, samples, send) if call.stream else None
        try:
            if not await attended(lambda: samples.run(stream), receive):
                samples.abandon()
                return
        except ApiError as error:
            await (stream.fail(error) if stream else error.response()(scope, receive, send))
            return
        if stream is None:
            await json_response(self._form.answers.whole(call, samples.whole()))(scope, receive, send)


class Samples:
    """The generations of one call."""

    def __init__(self, engine: VllmEngine, call: Call) -> None:
        self.call = call
        self._engine = engine
        self._all = [Generation(engine, job, job.sampling, job.limit) for job in call.jobs]

    async def run(self, stream: Stream | None) -> None:
        """Starts all, and sees them to their end or that of the engine.

        Raises:
            ApiError: The engine refuses them, or is dead.
        """
        await self._engine.admit()
        for generation in self._all:
            generation.start()
        await (asyncio.wait([generation.done for generation in self._all]) if stream is None else stream.run())
        self._engine.check_alive()

    def abandon(self) -> None:
        """Ends what nobody waits for any more."""
        for generation in self._all:
            self._engine.disconnected(generation.job)

    def whole(self) -> list[Piece]:
        """Returns all from their beginning."""
        return [self.piece(index, 0) for index in range(len(self._all))]

    def piece(self, index: int, start: int) -> Piece:
        """Returns what there is now of one, without its first tokens."""
        generation = self._all[index]
        request, job = generation.request, generation.job
        assert request is not None
        assert isinstance(job, VllmJob)
        final = request.finish is not None
        end = request.count if final else max(start, generation.produced)
        request.stream.grow(end)
        return Piece(index, job, request, start, end, final)

    async def wait(self, indices: Iterable[int]) -> None:
        """Waits until one of these has ended, or may have new tokens.

        Raises:
            ApiError: The engine is dead.
        """
        waiting = [self._all[index].done for index in indices]
        await asyncio.wait(waiting, timeout=self._engine.pace, return_when=asyncio.FIRST_COMPLETED)
        self._engine.check_alive()


class Stream:
    """The server-sent events of one call: what is new in each of its samples."""

    def __init__(self, answers: TokenAnswers | CompletionAnswers, samples: Samples, send: Send) -> None:
        self._answers = answers
        self._samples = samples
        self._events = Events(send)
        self._sent: dict[int, int] = {}

    async def run(self) -> None:
        """Sends events until all samples have ended."""
        call = self._samples.call
        left = set(range(len(call.jobs)))
        while left:
            for index in sorted(left):
                if await self._advance(index):
                    left.discard(index)
            if left:
                await self._samples.wait(left)
        if call.usage_at_end:
            await self._events.send(dumps(self._answers.last(call, self._samples.whole())))
        await self._events.end()

    async def _advance(self, index: int) -> bool:
        """Sends what is new in one sample, and returns whether that was its end."""
        piece = self._samples.piece(index, self._sent.get(index, 0))
        if piece.final or piece.ids:
            first = index not in self._sent
            await self._events.send(dumps(self._answers.chunk(self._samples.call, piece, first=first)))
            self._sent[index] = piece.end
        return piece.final

    async def fail(self, error: ApiError) -> None:
        """Sends an error as the last event; a stream has no other status than 200."""
        await self._events.fail(error.body)


def _check_type(headers: Headers) -> None:
    if headers.get("content-type", "").lower().split(";")[0] != "application/json":
        words = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise plain_error(400, words)


async def attended(work: Callable[[], Awaitable[None]], receive: Receive) -> bool:
    """Does the work; once the client has gone, drops it at once and returns False."""
    tasks = [asyncio.ensure_future(work()), asyncio.ensure_future(client_gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return False
        tasks[0].result()
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
