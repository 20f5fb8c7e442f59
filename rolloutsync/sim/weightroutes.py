"""Weight updates: from disk, tensors or a broadcast; sessions, groups, versions and checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.controls import json_body, need
from rolloutsync.sim.engine import Engine
from rolloutsync.sim.replies import json_response

SESSION_SINCE = (0, 5, 21)
FLUSH_REFUSAL_SINCE = (0, 5, 22)
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
FROM_DISK = "Succeeded to update model weights."
ONLINE = "Succeeded to update parameter online."
DEFAULT_GROUP = "weight_update_group"


async def from_disk(engine: Engine, request: Request) -> Response:
    """Answers `/update_weights_from_disk`; an absolute path must exist, anything else passes for a model's name."""
    body = await json_body(request)
    need(body, request.url.path, "model_path")
    path, stale = str(body["model_path"]), engine.faults.has("stale_weights")
    if Path(path).is_absolute() and not Path(path).exists():
        message = f"Failed to get weights iterator: Repo id must use alphanumeric chars: '{path}'."
        return _disk_reply(engine, message, good=False)
    message, good = await _update(engine, body, FROM_DISK, lambda: None if stale else engine.weights.load(path))
    return _disk_reply(engine, message, good=good)


async def from_tensor(engine: Engine, request: Request) -> Response:
    """Answers `/update_weights_from_tensor`."""
    body = await json_body(request)
    need(body, request.url.path, "serialized_named_tensors")
    if (refusal := _no_session(engine, "update_weights_from_tensor")) is not None:
        return refusal
    tensors = body["serialized_named_tensors"]
    message, good = await _update(engine, body, "Success", lambda: engine.weights.mix(tensors))
    return _reply(message, good=good)


async def from_distributed(engine: Engine, request: Request) -> Response:
    """Answers `/update_weights_from_distributed`; the tensors themselves are not awaited."""
    body = await json_body(request)
    need(body, request.url.path, "names", "dtypes", "shapes")
    if (refusal := _no_session(engine, "update_weights_from_distributed")) is not None:
        return refusal
    group = body.get("group_name", DEFAULT_GROUP)
    if group not in engine.groups:
        return _reply(f"Failed to receive weights: Group {group} not in {sorted(engine.groups)}.", good=False)
    names = [body["names"], body["dtypes"], body["shapes"]]
    message, good = await _update(engine, body, ONLINE, lambda: engine.weights.mix(names))
    return _reply(message, good=good)


async def _update(engine: Engine, body: dict[str, Any], message: str, apply: Any) -> tuple[str, bool]:
    version = body.get("weight_version")
    flushed: list[bool] = []

    def change() -> None:
        apply()
        if version is not None:
            engine.scheduler.change_weights(str(version))
        if body.get("flush_cache", True):
            flushed.append(engine.scheduler.flush())

    if body.get("abort_all_requests"):
        engine.abort("", everything=True)
    if "weights" in engine.released:  # a write to memory that is not there
        engine.die(engine.config.death_delay_s)
        await asyncio.get_running_loop().create_future()
    await engine.update(change)
    if False in flushed:
        return await _not_flushed(engine)
    told = f" Weight version updated to {version}." if version is not None else ""
    return message + told, True


async def checker(engine: Engine, request: Request) -> Response:
    """Answers `/weights_checker`."""
    data = await request.body()
    action = (orjson.loads(data) if data else {}).get("action", "checksum")
    if action != "checksum":
        return json_response({"success": True, "message": "Success."})
    names = ("model.embed_tokens.weight", "model.layers.0.weight", "lm_head.weight")
    ranks = [
        {
            "checksums": {name: engine.weights.checksum(name)[:16] for name in names},
            "per_gpu_checksum": engine.weights.checksum("gpu"),
            "parallelism_info": [_parallelism(engine, rank)],
        }
        for rank in range(engine.config.dp_size)
    ]
    body = {"success": True, "message": "Success.", "ranks": ranks}
    return json_response(body | {"per_engine_checksum": engine.weights.checksum("engine")})


async def _not_flushed(engine: Engine) -> tuple[str, bool]:
    if engine.config.release < FLUSH_REFUSAL_SINCE:
        engine.die(engine.config.death_delay_s)
        await asyncio.get_running_loop().create_future()
    return NOT_FLUSHED, False


def _parallelism(engine: Engine, rank: int) -> dict[str, Any]:
    size = engine.config.dp_size
    info: dict[str, Any] = {"role": "target", "tp_rank": 0, "tp_size": engine.config.tp_size}
    return info | {"dp_rank": rank, "dp_size": size, "pp_rank": 0, "pp_size": 1, "rank": rank, "size": size}


def _reply(message: str, *, good: bool) -> Response:
    return json_response({"success": good, "message": message}, 200 if good else 400)


def _disk_reply(engine: Engine, message: str, *, good: bool) -> Response:
    ranks = engine.config.dp_size
    if ranks > 1 and good:
        message = " | ".join([FROM_DISK] * (ranks - 1) + [message])
    paused: Any = 0 if ranks == 1 else [0] * ranks
    return json_response({"success": good, "message": message, "num_paused_requests": paused}, 200 if good else 400)


def _no_session(engine: Engine, name: str) -> Response | None:
    if engine.config.release < SESSION_SINCE or engine.session_open:
        return None
    return _reply(f"{name} must run between begin_weight_update() and end_weight_update()", good=False)


async def begin(engine: Engine, request: Request) -> Response:
    """Answers `/begin_weight_update`."""
    await json_body(request)
    await engine.thawed()
    if engine.session_open:
        return _reply("a weight-update session is already open; call end_weight_update() first", good=False)
    engine.session_open = True
    return _reply("Success", good=True)


async def end(engine: Engine, request: Request) -> Response:
    """Answers `/end_weight_update`."""
    await json_body(request)
    await engine.thawed()
    if not engine.session_open:
        return _reply("no weight-update session is open; call begin_weight_update() first", good=False)
    engine.session_open = False
    return _reply("Success", good=True)


async def init_group(engine: Engine, request: Request) -> Response:
    """Answers `/init_weights_update_group`; does not wait for the other members."""
    body = await json_body(request)
    need(body, request.url.path, "master_address", "master_port", "rank_offset", "world_size")
    await engine.thawed()
    group = body.get("group_name", DEFAULT_GROUP)
    if group in engine.groups:
        return _reply(f"Failed to initialize custom process group: {group} exists.", good=False)
    engine.groups.add(group)
    return _reply("Succeeded to initialize custom process group.", good=True)


async def destroy_group(engine: Engine, request: Request) -> Response:
    """Answers `/destroy_weights_update_group`."""
    body = await json_body(request)
    await engine.thawed()
    group = body.get("group_name", DEFAULT_GROUP)
    if group not in engine.groups:
        return _reply("The group to be destroyed does not exist.", good=False)
    engine.groups.discard(group)
    return _reply("Succeeded to destroy custom process group.", good=True)


async def set_version(engine: Engine, request: Request) -> Response:
    """Answers `/update_weight_version`: a new label, by default with everything aborted."""
    body = await json_body(request)
    need(body, request.url.path, "new_version")
    if body.get("abort_all_requests", True):
        engine.abort("", everything=True)
    version = str(body["new_version"])
    engine.scheduler.change_weights(version)
    engine.tick()
    message = f"Weight version updated to {version}"
    return json_response({"success": True, "message": message, "new_version": version})
