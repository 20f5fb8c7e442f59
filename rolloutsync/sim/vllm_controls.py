"""vLLM's control plane of the developer mode: aborts, pauses, sleep and caches."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.replies import json_response
from rolloutsync.sim.vllm_engine import CORE_PAUSE_SINCE, MODES, VllmEngine
from rolloutsync.sim.vllm_errors import Detail, invalid, not_among, plain_error

MODES_SINCE = (0, 16, 0)
SUCCESS_SINCE = (0, 26, 0)
SLEEP_WORDS_SINCE = (0, 32, 0)
NO_JSON = "JSON decode error: Expecting value: line 1 column 1 (char 0)"
MAX_LEVEL = 2
MEMORY = ("weights", "kv_cache")
TRUE, FALSE = ("1", "true", "on", "t", "y", "yes"), ("0", "false", "off", "f", "n", "no")


async def abort(engine: VllmEngine, request: Request) -> Response:
    """Answers `/abort_requests` of the developer mode: at once, and counts what it was told, not what it found."""
    body = await object_of(request, "Invalid JSON format")
    ids = body.get("request_ids")
    engine.ledger.saw_abort(ids or (), everything=not ids, ignored=False)
    count = len(ids) if ids else engine.abortable
    if ids:
        engine.abort_outer(ids)
    else:
        engine.abort("", everything=True)
    return json_response({"status": "aborted", "aborted": count})


async def abort_scaled_out(engine: VllmEngine, request: Request) -> Response:
    """Answers `/inference/v1/abort_requests`: 200 and nothing else, whatever comes of it."""
    body = await object_of(request, NO_JSON)
    if (ids := body.get("request_ids")) is None:
        raise plain_error(400, "Missing 'request_ids' in request body")
    engine.ledger.saw_abort(ids, everything=False, ignored=False)
    engine.abort_outer(ids)
    return Response()


async def object_of(request: Request, no_json: str) -> dict[str, Any]:
    """Returns the body of a call that reads it by itself.

    Raises:
        ApiError: It is no object, or in the words of `no_json` no JSON.
    """
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise plain_error(400, no_json) from error
    if not isinstance(body, dict):
        raise plain_error(400, "Request body must be a JSON object")
    return body


async def pause(engine: VllmEngine, request: Request) -> Response:
    """Answers `/pause`."""
    mode = _mode(request) if engine.config.release >= MODES_SINCE else "abort"
    if engine.config.release < (0, 32, 0) and flag(request, "wait_for_inflight_requests", default=False):
        mode = "wait"
    await engine.pause(mode, clear_cache=flag(request, "clear_cache", default=True))
    return json_response({"status": "paused"})


def _mode(request: Request) -> str:
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise invalid(not_among("query.mode", MODES, mode))
    return mode


def flag(request: Request, name: str, *, default: bool) -> bool:
    """Returns a flag of the query.

    Raises:
        ApiError: It is no truth value.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in TRUE + FALSE:
        words = "Input should be a valid boolean, unable to interpret input"
        raise invalid(Detail("bool_parsing", f"query.{name}", words, text))
    return text.lower() in TRUE


async def resume(engine: VllmEngine, _: Request) -> Response:
    """Answers `/resume`."""
    await engine.resume()
    return json_response({"status": "resumed"})


async def is_paused(engine: VllmEngine, _: Request) -> Response:
    """Answers `/is_paused`; older versions do not count a pause that keeps its requests."""
    if engine.config.release < CORE_PAUSE_SINCE:
        return json_response({"is_paused": engine.paused and not engine.kept})
    await engine.thawed()
    return json_response({"is_paused": engine.paused})


async def sleep(engine: VllmEngine, request: Request) -> Response:
    """Answers `/sleep`; what comes while it sleeps is queued."""
    level = _level(request)
    await engine.thawed()
    await engine.halt(_mode(request), clear_cache=level > 0)
    engine.released |= set(MEMORY) if level else set()
    return _words(engine, {"status": "sleeping", "level": level})


def _level(request: Request) -> int:
    text = request.query_params.get("level", "1")
    if not text.isdigit():
        words = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid(Detail("int_parsing", "query.level", words, text))
    if int(text) > MAX_LEVEL:
        words = f"Input should be less than or equal to {MAX_LEVEL}"
        raise invalid(Detail("less_than_equal", "query.level", words, text, {"le": MAX_LEVEL}))
    return int(text)


async def wake_up(engine: VllmEngine, request: Request) -> Response:
    """Answers `/wake_up`: some of the memory, or all of it; all of it lets the scheduler go on."""
    tags = request.query_params.getlist("tags") or None
    await engine.thawed()
    engine.released -= set(MEMORY if tags is None else tags)
    if not engine.released:
        await engine.resume()
    return _words(engine, {"status": "sleeping" if engine.released else "awake", "tags": tags})


def _words(engine: VllmEngine, body: dict[str, Any]) -> Response:
    return json_response(body) if engine.config.release >= SLEEP_WORDS_SINCE else Response()


async def is_sleeping(engine: VllmEngine, _: Request) -> Response:
    """Answers `/is_sleeping`, which is also true in a pause."""
    await engine.thawed()
    return json_response({"is_sleeping": bool(engine.released) or engine.paused})


async def reset_prefix_cache(engine: VllmEngine, request: Request) -> Response:
    """Answers `/reset_prefix_cache`: 200 even where running requests prevent it."""
    preempt = flag(request, "reset_running_requests", default=False)
    await engine.thawed()
    done = engine.flush(preempt=preempt)
    return json_response({"success": done}) if engine.config.release >= SUCCESS_SINCE else Response()


async def nothing(engine: VllmEngine, _: Request) -> Response:
    """Answers `/reset_mm_cache` and `/reset_encoder_cache`, of which the simulation has neither."""
    await engine.thawed()
    return Response()
