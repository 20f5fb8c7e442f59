"""vLLM's two generation endpoints: whole answers and streams, and the client that goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
        engine, body = self._engine, None
        try:
            _check_type(Headers(scope=scope))
            body = json_of(await read_body(receive))
            call = self._form.parse(body, Headers(scope=scope), engine.config, engine.model.tokenizer)
        except LateError as error:
            await (Events(send).fail(error.body) if _streams(body) else error.response()(scope, receive, send))
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        engine.register(call.jobs, stream=call.stream)
        await engine.enter()
        try:
            await self._serve(call, scope, receive, send)
        finally:
            engine.leave()
            engine.forget(call.jobs)

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        generations = [Generation(self._engine, job, job.sampling, job.limit) for job in call.jobs]
        events = Events(send)

        async def work() -> None:
            await self._engine.admit()
            for generation in generations:
                generation.start()
            await (self._stream(call, generations, events) if call.stream else _ended(generations))
            self._engine.check_alive()

        try:
            if not await attended(work, receive):
                for generation in generations:
                    self._engine.disconnected(generation.job)
                return
        except ApiError as error:
            await (events.fail(error.body) if call.stream else error.response()(scope, receive, send))
            return
        if not call.stream:
            pieces = [_piece(index, each, 0) for index, each in enumerate(generations)]
            await json_response(self._form.answers.whole(call, pieces))(scope, receive, send)

    async def _stream(self, call: Call, generations: Sequence[Generation], events: Events) -> None:
        sent = dict.fromkeys(range(len(generations)), 0)
        fresh = set(sent)
        while sent:
            for index in list(sent):
                piece = _piece(index, generations[index], sent[index])
                if piece.final or piece.end > piece.start:
                    chunk = self._form.answers.chunk(call, piece, first=index in fresh)
                    await events.send(dumps(chunk))
                    fresh.discard(index)
                    sent[index] = piece.end
                if piece.final:
                    del sent[index]
            if sent:
                waiting = [generations[index].done for index in sent]
                await asyncio.wait(waiting, timeout=self._engine.pace, return_when=asyncio.FIRST_COMPLETED)
                self._engine.check_alive()
        if call.usage_at_end:
            pieces = [_piece(index, each, 0) for index, each in enumerate(generations)]
            await events.send(dumps(self._form.answers.last(call, pieces)))
        await events.end()


def _check_type(headers: Headers) -> None:
    if headers.get("content-type", "").lower().split(";")[0] != "application/json":
        words = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise plain_error(400, words)


def _streams(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.get("stream"))


async def _ended(generations: Sequence[Generation]) -> None:
    await asyncio.wait([generation.done for generation in generations])


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


def _piece(index: int, generation: Generation, start: int) -> Piece:
    request, job = generation.request, generation.job
    assert request is not None
    assert isinstance(job, VllmJob)
    final = request.finish is not None
    end = request.count if final else max(start, generation.produced)
    request.stream.grow(end)
    return Piece(index, job, request, start, end, final)
