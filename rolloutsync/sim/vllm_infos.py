"""What a vLLM engine tells about itself."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.replies import json_response
from rolloutsync.sim.vllm_engine import VllmEngine


async def health(engine: VllmEngine, _: Request) -> Response:
    """Answers `/health`: a look at a flag, whatever the core does."""
    return Response(status_code=503 if engine.dead else 200)


async def version(engine: VllmEngine, _: Request) -> Response:
    """Answers `/version`."""
    return json_response({"version": engine.config.version})


async def load(engine: VllmEngine, _: Request) -> Response:
    """Answers `/load`: calls that are being served, if they are counted."""
    tracked = engine.config.enable_server_load_tracking
    return json_response({"server_load": engine.in_flight if tracked else 0})


async def models(engine: VllmEngine, _: Request) -> Response:
    """Answers `/v1/models`."""
    name, now = engine.config.model_path, int(time.time())
    card = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": name, "parent": None}
    card |= {"max_model_len": engine.config.context_length, "permission": [_permission(now)]}
    return json_response({"object": "list", "data": [card]})


def _permission(now: int) -> dict[str, Any]:
    allowed = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    denied = dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False)
    head = {"id": "modelperm-simulated", "object": "model_permission", "created": now}
    return head | allowed | denied | {"organization": "*", "group": None}


async def server_info(engine: VllmEngine, _: Request) -> Response:
    """Answers `/server_info` in its JSON format."""
    config = engine.config
    parallel = {
        "tensor_parallel_size": config.tp_size,
        "data_parallel_size": config.dp_size,
        "pipeline_parallel_size": 1,
        "world_size": config.tp_size,
    }
    told = {
        "model_config": {"model": config.model_path, "max_model_len": config.context_length},
        "parallel_config": parallel,
        "scheduler_config": {"max_num_seqs": config.max_running_requests},
    }
    return json_response({"vllm_config": told, "vllm_env": {"VLLM_SERVER_DEV_MODE": config.dev_mode}, "system_env": {}})


async def tokenize(engine: VllmEngine, request: Request) -> Response:
    """Answers `/tokenize` of a text."""
    body = await request.json()
    ids = engine.model.tokenizer.encode(str(body["prompt"]))
    most = engine.config.context_length
    return json_response({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": None})


async def detokenize(engine: VllmEngine, request: Request) -> Response:
    """Answers `/detokenize`."""
    body = await request.json()
    return json_response({"prompt": engine.model.tokenizer.decode(body["tokens"], special=True)})
