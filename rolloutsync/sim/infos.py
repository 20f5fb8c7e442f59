"""Who the engine is and whether it lives: `/model_info`, `/server_info`, `/health` and their aliases."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.replies import json_response, object_error

MODERN_SINCE = (0, 5, 13)
ROOT_SINCE = (0, 5, 23)  # older ones were not asked
RENAMED_SINCE = (0, 5, 6)
RESERVED_TOKENS = 6


async def root(_: Engine, __: Request) -> Response:
    """Answers `/`."""
    return json_response("SGLang is running")


async def model_info(engine: Engine, _: Request) -> Response:
    """Answers `/model_info`; never blocks."""
    config = engine.config
    info: dict[str, Any] = {
        "model_path": config.model_path,
        "served_model_name": config.model_path,
        "tokenizer_path": config.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.scheduler.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "sim_moe" if config.routed_experts else "sim",
        "architectures": ["SimForCausalLM"],
    }
    if config.release < MODERN_SINCE:
        for name in ("served_model_name", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode"):
            del info[name]
    return json_response(info)


async def server_info(engine: Engine, _: Request) -> Response:
    """Answers `/server_info`; asks the schedulers, and so hangs with them."""
    await engine.thawed()
    arguments = _arguments(engine)
    state = arguments | {
        "last_gen_throughput": 0.0,
        "effective_max_running_requests_per_dp": engine.config.max_running_requests,
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": engine.config.max_total_tokens},
    }
    info = arguments | {
        "status": "ready",
        "max_total_num_tokens": engine.config.max_total_tokens,
        "max_req_input_len": engine.config.context_length - RESERVED_TOKENS,
        "internal_states": [state] * engine.config.dp_size,
        "version": engine.config.version,
    }
    return json_response(info | ({"frontend": "python"} if engine.config.release >= MODERN_SINCE else {}))


def _arguments(engine: Engine) -> dict[str, Any]:
    config = engine.config
    return {
        "model_path": config.model_path,
        "tokenizer_path": config.model_path,
        "served_model_name": config.model_path,
        "skip_tokenizer_init": False,
        "host": config.host,
        "port": config.port,
        "context_length": config.context_length,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.max_total_tokens,
        "chunked_prefill_size": config.chunked_prefill_size,
        "schedule_policy": "fcfs",
        "page_size": 1,
        "device": "sim",
        "tp_size": config.tp_size,
        "pp_size": 1,
        "dp_size": config.dp_size,
        "nnodes": 1,
        "node_rank": 0,
        "load_balance_method": "round_robin",
        "enable_dp_attention": False,
        "enable_memory_saver": True,
        "enable_return_routed_experts": config.routed_experts is not None,
        "enable_return_hidden_states": config.hidden_size > 0,
        "speculative_algorithm": None,
        "random_seed": 0,
        "api_key": config.api_key,
        "admin_api_key": config.admin_api_key,
    }


async def models(engine: Engine, _: Request) -> Response:
    """Answers `/v1/models`."""
    return json_response({"object": "list", "data": [_card(engine)]})


async def model(engine: Engine, request: Request) -> Response:
    """Answers `/v1/models/{model}`."""
    name = request.path_params["model"]
    if name == engine.config.model_path:
        return json_response(_card(engine))
    words = f"The model '{name}' does not exist"
    error = {"message": words, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    return json_response({"error": error}, 404)


def _card(engine: Engine) -> dict[str, Any]:
    name = engine.config.model_path
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": engine.config.context_length,
    }


async def weight_version(engine: Engine, _: Request) -> Response:
    """Answers `/weight_version`, which was given up before it was removed."""
    if engine.config.release >= RENAMED_SINCE:
        message = "Endpoint '/get_weight_version' or '/weight_version' is deprecated. Please use '/model_info' instead."
        raise object_error(404, message)
    return json_response({"weight_version": engine.scheduler.weight_version})


async def health(engine: Engine, _: Request) -> Response:
    """Answers `/health`: waits for a token to be generated, which a pause or a freeze prevents."""
    if engine.leaving:
        return Response(status_code=503)
    config = engine.config
    deadline = engine.now() + config.health_timeout_s
    while engine.now() < deadline:
        await asyncio.sleep(config.health_poll_s)
        if not engine.paused and not engine.scheduler.frozen:
            engine.healthy = True
            return Response()
    engine.healthy = False
    return Response(status_code=503)


async def ping(engine: Engine, _: Request) -> Response:
    """Answers `/ping`: alive, paused or not."""
    return Response(status_code=200 if engine.healthy and not engine.leaving else 503)


async def ready(engine: Engine, _: Request) -> Response:
    """Answers `/ready`: alive and not paused."""
    good = engine.healthy and not engine.leaving and not engine.paused
    return Response(status_code=200 if good else 503)
