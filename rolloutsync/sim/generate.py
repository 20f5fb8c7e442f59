"""`/generate`: one answer, a list of them, or a stream; and the client that goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import Receive, Scope, Send

from rolloutsync.sim import jobs
from rolloutsync.sim.engine import Engine
from rolloutsync.sim.generation import Generation
from rolloutsync.sim.jobs import Asked, Job
from rolloutsync.sim.replies import ApiError, dumps, json_response, loads_body, object_error, value_error
from rolloutsync.sim.request import Phase, Refusal
from rolloutsync.sim.sse import Events

Message = MutableMapping[str, Any]


class SglangGeneration(Generation):
    """One that `/generate` answers."""

    def __init__(self, engine: Engine, job: Job) -> None:
        sampling = jobs.check(job, engine.config)
        super().__init__(engine, job, sampling, jobs.output_limit(sampling, len(job.prompt), engine.config))
        self.gone_with: int | None = None

    async def warm(self) -> None:
        """Lets its prompt be computed, for its siblings to find it in the cache."""
        warmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine.warm(self.job, self.sampling, lambda: warmed.set_result(None))
        await warmed

    def refusal(self) -> ApiError | None:
        """Returns the error that it ended with, if it did."""
        finish = self.request.finish if self.request else None
        if not isinstance(finish, Refusal):
            return None
        return value_error(finish.message) if finish.status == 400 else object_error(finish.status, finish.message)

    def accept_refusal(self) -> None:
        """Turns a refusal into an abort that carries its status, as streams report it."""
        assert self.request is not None
        if isinstance(finish := self.request.finish, Refusal):
            reason = {"type": "abort", "message": finish.message, "status_code": finish.status}
            self.request.finish = reason if self.request.while_queued else reason | {"err_type": None}

    def answer(self) -> dict[str, Any]:
        """Returns the finished answer."""
        assert self.request is not None
        engine = self._engine
        ended = engine.wall(self.request.finished)
        return engine.answers.finished(self.job, self.request, engine.now() - self._arrived, ended)

    def chunk(self, count: int) -> dict[str, Any]:
        """Returns the answer so far."""
        assert self.request is not None
        return self._engine.answers.partial(self.job, self.request, count)


class GenerateEndpoint:
    """The ASGI application of `/generate`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one call."""
        try:
            body = loads_body(await read_body(receive), scope["path"])
            engine, strict = self._engine, scope["path"] == "/generate"
            asked = jobs.parse(body, engine.config, engine.model.tokenizer, strict=strict)
            self._engine.register(asked.jobs, stream=asked.stream)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await self._engine.enter()
            try:
                await self._serve(asked, scope, receive, send)
            finally:
                self._engine.leave()
        finally:
            self._engine.forget(asked.jobs)

    async def _serve(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        stream = Stream(self._engine, asked, send) if asked.stream else None
        try:
            generations = await self._start(asked)
            if stream is not None:
                await self._with_client(generations, receive, lambda: stream.run(generations), at_once=True)
                return
            if not await self._with_client(generations, receive, lambda: self._all_done(generations), at_once=False):
                return
            self._check(generations)
        except ApiError as error:
            await (stream.fail(error) if stream else error.response()(scope, receive, send))
            return
        answers = [generation.answer() for generation in generations]
        await json_response(answers if asked.is_list else answers[0])(scope, receive, send)

    async def _start(self, asked: Asked) -> list[SglangGeneration]:
        generations = [SglangGeneration(self._engine, job) for job in asked.jobs]
        if any(jobs.is_fatal(job, self._engine.config) for job in asked.jobs):
            await self._choke()
        if asked.copies > 1:
            for generation in generations[:: asked.copies]:
                await generation.warm()
        for generation in generations:
            generation.start()
        return generations

    async def _choke(self) -> None:
        if not self._engine.config.die_on_bad_token:
            raise value_error(f"input_ids must be in [0, {self._engine.config.vocab_size}).")
        self._engine.die(self._engine.config.death_delay_s)
        await asyncio.get_running_loop().create_future()

    def _check(self, generations: list[SglangGeneration]) -> None:
        error = next((error for generation in generations if (error := generation.refusal())), None)
        if error is not None:
            raise error

    async def _all_done(self, generations: list[SglangGeneration]) -> None:
        if len(generations) == 1:
            await generations[0].done
            return
        for done in asyncio.as_completed([generation.done for generation in generations]):
            await done
            if any(generation.refusal() for generation in generations):
                self._abort(generations)
                return

    def _abort(self, generations: list[SglangGeneration]) -> None:
        for generation in generations:
            self._engine.abort(generation.job.rid, everything=False)

    async def _with_client(
        self,
        generations: list[SglangGeneration],
        receive: Receive,
        work: Callable[[], Awaitable[None]],
        *,
        at_once: bool,
    ) -> bool:
        """Does the work while the client is there; once it has gone, ends everything and returns False."""
        working = asyncio.ensure_future(work())
        watching = asyncio.ensure_future(client_gone(receive))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return True
            if at_once:
                working.cancel()
            await self._notice(generations, at_once=at_once)
            await asyncio.wait([generation.done for generation in generations])
            return False
        finally:
            watching.cancel()
            working.cancel()
            await asyncio.gather(watching, working, return_exceptions=True)

    async def _notice(self, generations: list[SglangGeneration], *, at_once: bool) -> None:
        """Aborts each generation when the engine would notice that its client has gone."""
        pending = {generation.job.rid: generation for generation in generations}
        started = self._engine.now()
        while pending:
            for rid, generation in list(pending.items()):
                if generation.done.done() or at_once or self._notices(generation, started):
                    self._engine.disconnected(generation.job)
                    del pending[rid]
            if pending:
                await asyncio.sleep(0.01)

    def _notices(self, generation: SglangGeneration, gone_at: float) -> bool:
        config, request = self._engine.config, generation.request
        every = config.report_interval
        if request is not None and request.phase is Phase.RUNNING:
            if generation.gone_with is None:
                generation.gone_with = generation.produced
            if generation.produced // every > generation.gone_with // every:
                return True
        return self._engine.now() - gone_at >= config.disconnect_poll_s


class Stream:
    """Server-sent events of one call: everything so far in every chunk, `[DONE]` at the end."""

    def __init__(self, engine: Engine, asked: Asked, send: Send) -> None:
        self._engine = engine
        self._asked = asked
        self._events = Events(send)

    async def run(self, generations: list[SglangGeneration]) -> None:
        """Sends chunks until all generations have ended."""
        sent = {generation.job.rid: 0 for generation in generations}
        while sent:
            for index, generation in enumerate(generations):
                if generation.job.rid in sent:
                    await self._advance(index, generation, sent)
            waiting = [generation.done for generation in generations if generation.job.rid in sent]
            if waiting:
                await asyncio.wait(waiting, timeout=self._engine.pace, return_when=asyncio.FIRST_COMPLETED)
        await self._events.end()

    async def _advance(self, index: int, generation: SglangGeneration, sent: dict[str, int]) -> None:
        rid = generation.job.rid
        if generation.done.done():
            del sent[rid]
            generation.accept_refusal()
            answer = generation.answer()
            answer["meta_info"].pop("response_sent_to_client_ts", None)
            await self._event(index, answer)
            return
        produced = generation.produced
        interval = generation.sampling.stream_interval or self._engine.config.stream_interval
        if produced >= sent[rid] + interval or (produced and not sent[rid]):
            sent[rid] = produced
            await self._event(index, generation.chunk(produced))

    async def _event(self, index: int, value: dict[str, Any]) -> None:
        if self._asked.is_list:
            value = value | {"index": index}
        await self._events.send(dumps(value))

    async def fail(self, error: ApiError) -> None:
        """Sends an error as the last event."""
        await self._events.fail(stream_error(error))


def stream_error(error: ApiError) -> dict[str, Any]:
    """Returns an error in the form that streams have."""
    body = error.body if isinstance(error.body, dict) else {"message": str(error.body)}
    inner = body.get("error", body)
    message = inner.get("message", "") if isinstance(inner, dict) else inner
    return {"error": {"message": message, "type": "invalid_request_error", "code": error.status, "retryable": False}}


async def read_body(receive: Receive) -> bytes:
    """Reads a request's whole body; what a client sent before it went away counts as the whole."""
    parts: list[bytes] = []
    while True:
        message: Message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def client_gone(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue
