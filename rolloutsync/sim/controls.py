"""The control plane: aborts, pauses, the cache, memory and speed."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.replies import json_response, loads_body, validation_error, value_error

MODES_SINCE = (0, 5, 6)
FLUSH_TEXT_SINCE = (0, 5, 10)
FLUSH_POLL_S = 0.02
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
NOT_FLUSHED = "Flush cache failed.\n"
MODES = ("abort", "in_place", "retract")
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


async def json_body(request: Request) -> dict[str, Any]:
    """Returns the body, which must be a JSON object.

    Raises:
        ApiError: It is not.
    """
    body = loads_body(await request.body(), request.url.path)
    if not isinstance(body, dict):
        raise validation_error(request.url.path, "model_attributes_type", "Input should be a valid dictionary")
    return body


def need(body: dict[str, Any], path: str, *names: str) -> None:
    """Checks that fields are there.

    Raises:
        ApiError: One is not.
    """
    missing = next((name for name in names if name not in body), None)
    if missing is not None:
        raise validation_error(path, "missing", "Field required", ("body", missing))


async def abort(engine: Engine, request: Request) -> Response:
    """Answers `/abort_request`: always 200, whatever came of it."""
    body = await json_body(request)
    rid, everything = body.get("rid") or "", body.get("abort_all", False)
    if not isinstance(everything, bool | int):
        words = "Input should be a valid boolean"
        raise validation_error(request.url.path, "bool_parsing", words, ("body", "abort_all"))
    if not isinstance(rid, str):
        raise validation_error(request.url.path, "string_type", "Input should be a valid string", ("body", "rid"))
    engine.ledger.saw_abort([rid] if rid else [], everything=bool(everything), ignored=False)
    engine.abort(rid, everything=bool(everything))
    return Response()


async def pause(engine: Engine, request: Request) -> Response:
    """Answers `/pause_generation`."""
    old = engine.config.release < MODES_SINCE
    mode = "abort" if old else (await json_body(request)).get("mode", "abort")
    if mode not in MODES:
        words = "Input should be 'abort', 'in_place' or 'retract'"
        raise validation_error(request.url.path, "literal_error", words, ("body", "mode"))
    await engine.pause(mode)
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def resume(engine: Engine, request: Request) -> Response:
    """Answers `/continue_generation`."""
    if engine.config.release >= MODES_SINCE:
        await json_body(request)
    await engine.resume()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def flush(engine: Engine, request: Request) -> Response:
    """Answers `/flush_cache`, with `timeout=` waiting for an idle moment."""
    await engine.thawed()
    timeout = _flush_timeout(engine, request)
    deadline = engine.now() + timeout
    while not (done := _flushed(engine, patient=timeout > 0)) and engine.now() < deadline:
        await asyncio.sleep(FLUSH_POLL_S)
    engine.tick()
    if done:
        return Response(FLUSHED)
    if engine.config.release < FLUSH_TEXT_SINCE:
        return Response(FLUSHED, 400)
    return Response("Timed out waiting for idle state." if timeout > 0 else NOT_FLUSHED, 400)


def _flushed(engine: Engine, *, patient: bool) -> bool:
    """Flushes if that can be done now; one that waits for an idle engine is not content with a retracted one."""
    engine.scheduler.advance()
    return (engine.scheduler.idle or not patient) and engine.scheduler.flush()


def _flush_timeout(engine: Engine, request: Request) -> float:
    text = request.query_params.get("timeout", "0") if engine.config.release >= FLUSH_TEXT_SINCE else "0"
    try:
        timeout = float(text)
    except ValueError as error:
        words = "Input should be a valid number"
        raise validation_error(request.url.path, "float_parsing", words, ("query", "timeout")) from error
    if timeout < 0:
        words = "Input should be greater than or equal to 0"
        raise validation_error(request.url.path, "greater_than_equal", words, ("query", "timeout"))
    return timeout


async def release_memory(engine: Engine, request: Request) -> Response:
    """Answers `/release_memory_occupation`; a busy engine dies of it."""
    tags = _tags(await json_body(request))
    await engine.thawed()
    engine.scheduler.advance()
    if any(rank.computing or (rank.waiting and not rank.paused) for rank in engine.scheduler.ranks):
        engine.die(engine.config.death_delay_s)
        await asyncio.get_running_loop().create_future()
    if engine.released & tags:
        raise value_error("The memory occupation is released already.")
    engine.released |= tags
    return json_response(None)


def _tags(body: dict[str, Any]) -> set[str]:
    return set(body.get("tags") or MEMORY_TAGS)


async def resume_memory(engine: Engine, request: Request) -> Response:
    """Answers `/resume_memory_occupation`; an engine dies of a tag that is not released, here only if others are."""
    tags = _tags(await json_body(request))
    await engine.thawed()
    if engine.released and not tags <= engine.released:
        engine.die(engine.config.death_delay_s)
        await asyncio.get_running_loop().create_future()
    engine.released -= tags
    return json_response(None)


async def slow_down(engine: Engine, request: Request) -> Response:
    """Answers `/slow_down`."""
    body = await json_body(request)
    engine.scheduler.slow_down(float(body.get("forward_sleep_time") or 0.0))
    engine.tick()
    return json_response(None)
