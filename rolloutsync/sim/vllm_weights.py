"""vLLM's weight transfers: the session of a transfer, versions, checksums, and calls of a worker's methods."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.replies import json_response
from rolloutsync.sim.vllm_controls import NO_JSON, flag, object_of
from rolloutsync.sim.vllm_engine import VllmEngine
from rolloutsync.sim.vllm_errors import Detail, error, invalid, missing, not_among, plain_error

SESSION_SINCE = (0, 21, 0)
CHECKED_SINCE = (0, 32, 0)
ACTIONS = ("checksum", "reset", "compare")
NAMES = ("model.embed_tokens.weight", "model.layers.0.weight", "lm_head.weight")


async def init(engine: VllmEngine, request: Request) -> Response:
    """Answers `/init_weight_transfer_engine`; does not wait for the other members."""
    await _field(engine, request, "init_info")
    await engine.thawed()
    engine.transfer_ready = True
    return json_response({"message": "Weight transfer initialized"})


async def shutdown(engine: VllmEngine, _: Request) -> Response:
    """Answers `/shutdown_weight_transfer_engine`."""
    await engine.thawed()
    engine.transfer_ready = False
    return json_response({"message": "Weight transfer shut down"})


async def start(engine: VllmEngine, _: Request) -> Response:
    """Answers `/start_weight_update`."""
    await engine.thawed()
    if engine.updating:
        raise _broken("start_weight_update called while a weight update is already active.")
    engine.updating = True
    return json_response({"message": "Weight update started"})


async def update(engine: VllmEngine, request: Request) -> Response:
    """Answers `/update_weights`; the tensors themselves are not awaited."""
    info = await _field(engine, request, "update_info")
    await engine.thawed()
    if engine.config.release >= SESSION_SINCE and not engine.updating:
        raise _broken("start_weight_update must be called before update_weights.")
    if not engine.transfer_ready:
        raise _broken("weight transfer not initialized. Call init_transfer_engine() first.")
    stale = engine.faults.has("stale_weights")
    await engine.update(lambda: None if stale else engine.weights.mix(info))
    return json_response({"message": "Weights updated"})


async def finish(engine: VllmEngine, request: Request) -> Response:
    """Answers `/finish_weight_update`."""
    data = await request.body()
    version = (orjson.loads(data) if data else {}).get("weight_version")
    await engine.thawed()
    if not engine.updating:
        raise _broken("finish_weight_update called without a matching start_weight_update.")
    engine.updating = False
    if version is not None:
        _label(engine, str(version))
    return json_response({"message": "Weight update finished"})


async def set_version(engine: VllmEngine, request: Request) -> Response:
    """Answers `/update_weight_version`: a new label."""
    version = await _field(engine, request, "new_version")
    if not isinstance(version, str):
        raise invalid(Detail("string_type", "body.new_version", "Input should be a valid string", version))
    await engine.thawed()
    _label(engine, version)
    return json_response({"success": True, "new_version": version})


def _label(engine: VllmEngine, version: str) -> None:
    engine.scheduler.change_weights(version)
    engine.tick()


async def info(engine: VllmEngine, _: Request) -> Response:
    """Answers `/weight_info`."""
    await engine.thawed()
    return json_response({"weight_version": engine.scheduler.weight_version})


async def checker(engine: VllmEngine, request: Request) -> Response:
    """Answers `/weight_checker`."""
    action = await _field(engine, request, "action")
    baseline = orjson.loads(await request.body()).get("baseline")
    if action not in ACTIONS:
        raise invalid(not_among("body.action", ACTIONS, action))
    await engine.thawed()
    if action == "reset":
        engine.weights.load("reset")
        return json_response({"status": "reset"})
    if action == "compare" and baseline is None:
        raise plain_error(400, "action='compare' requires a 'baseline' object")
    sums = {f"dp0:pp0:pcp0:tp0:{name}": engine.weights.checksum(name) for name in NAMES}
    if action == "checksum":
        return json_response({"checksums": sums})
    wrong = sorted(name for name in sums.keys() | baseline.keys() if sums.get(name) != baseline.get(name))
    return json_response({"match": not wrong, "mismatches": wrong})


async def collective_rpc(engine: VllmEngine, request: Request) -> Response:
    """Answers `/collective_rpc`: a method of every worker, of which the simulation has one that loads weights."""
    body = await object_of(request, NO_JSON)
    if (method := body.get("method")) is None:
        raise plain_error(400, "Missing 'method' in request body")
    await engine.thawed()
    if method not in RPC:
        raise _broken(f"'Worker' object has no attribute {method!r}")
    source = [body.get("args") or [], body.get("kwargs") or {}]
    if method == "reload_weights" and not engine.faults.has("stale_weights"):
        await engine.update(lambda: engine.weights.load(source))
    return json_response({"results": [None] * engine.config.tp_size})


RPC = ("reload_weights", "update_config", "check_health")


async def world_size(engine: VllmEngine, request: Request) -> Response:
    """Answers `/get_world_size`."""
    ranks = engine.config.dp_size if flag(request, "include_dp", default=True) else 1
    return json_response({"world_size": engine.config.tp_size * ranks})


async def _field(engine: VllmEngine, request: Request, name: str) -> Any:
    """Returns one field of the body, whose absence newer versions put in other words."""
    data, checked = await request.body(), engine.config.release >= CHECKED_SINCE
    try:
        body = orjson.loads(data) if data or not checked else {}
    except orjson.JSONDecodeError as problem:
        raise plain_error(400, "Invalid JSON format") from problem
    value = body.get(name) if isinstance(body, dict) else None
    if value is None and checked:
        raise invalid(missing(f"body.{name}"))
    if value is None:
        raise plain_error(400, f"Missing '{name}' in request body")
    return value


def _broken(message: str) -> Exception:
    """What a worker's complaint becomes."""
    words = f"Call to collective_rpc method failed: Worker failed with error '{message}'"
    return error(500, f"{words}, please check the stack trace above for the root cause")
