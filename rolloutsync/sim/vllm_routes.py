"""Which paths a vLLM engine answers, by version and by how it was started."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim import vllm_controls, vllm_infos, vllm_weights
from rolloutsync.sim.routes import BOTH, GET, POST, Table
from rolloutsync.sim.vllm_answers import CompletionAnswers, TokenAnswers
from rolloutsync.sim.vllm_engine import VllmEngine
from rolloutsync.sim.vllm_errors import error
from rolloutsync.sim.vllm_generate import Form, VllmEndpoint
from rolloutsync.sim.vllm_request import COMPLETIONS, GENERATE, parse_completion, parse_generate

GENERATE_SINCE = (0, 13, 0)
FLAG_SINCE = (0, 30, 0)  # from here on `/inference` wants --enable-scale-out
FORBIDDEN_SINCE = (0, 32, 0)  # and from here on says so; before, it is not there
ABORT = "/inference/v1/abort_requests"
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


def add_routes(table: Table[VllmEngine]) -> None:
    """Adds all of them."""
    engine = table.engine
    completions = CompletionAnswers(engine.config, engine.model)
    table.mount(COMPLETIONS, VllmEndpoint(engine, Form(parse_completion, completions)), POST)
    _add_scale_out(table)
    _add_infos(table)
    if engine.config.dev_mode:
        _add_controls(table)
        _add_weights(table)


def _add_scale_out(table: Table[VllmEngine]) -> None:
    config = table.engine.config
    if config.release < FLAG_SINCE or config.enable_scale_out:
        if config.release >= GENERATE_SINCE:
            answers = TokenAnswers(config, table.engine.model)
            table.mount(GENERATE, VllmEndpoint(table.engine, Form(parse_generate, answers)), POST)
        table.add(ABORT, vllm_controls.abort_scaled_out, POST, since=FORBIDDEN_SINCE)
        return
    for path in (GENERATE, ABORT):
        table.add(path, _forbidden, POST, since=FORBIDDEN_SINCE)


async def _forbidden(_: VllmEngine, __: Request) -> Response:
    raise error(403, DISABLED)


def _add_infos(table: Table[VllmEngine]) -> None:
    from rolloutsync.sim.vllm_metrics import metrics  # noqa: PLC0415 - SGLang without metrics needs no prometheus-client

    table.add("/health", vllm_infos.health, GET)
    table.add("/ping", vllm_infos.health, BOTH)
    table.add("/version", vllm_infos.version, GET)
    table.add("/load", vllm_infos.load, GET)
    table.add("/metrics", metrics, GET)
    table.add("/v1/models", vllm_infos.models, GET)
    table.add("/tokenize", vllm_infos.tokenize, POST)
    table.add("/detokenize", vllm_infos.detokenize, POST)


def _add_controls(table: Table[VllmEngine]) -> None:
    table.add("/abort_requests", vllm_controls.abort, POST, since=(0, 26, 0))
    table.add("/pause", vllm_controls.pause, POST, since=(0, 13, 0))
    table.add("/resume", vllm_controls.resume, POST, since=(0, 13, 0))
    table.add("/is_paused", vllm_controls.is_paused, GET, since=(0, 13, 0))
    table.add("/sleep", vllm_controls.sleep, POST)
    table.add("/wake_up", vllm_controls.wake_up, POST)
    table.add("/is_sleeping", vllm_controls.is_sleeping, GET)
    table.add("/reset_prefix_cache", vllm_controls.reset_prefix_cache, POST)
    table.add("/reset_mm_cache", vllm_controls.nothing, POST)
    table.add("/reset_encoder_cache", vllm_controls.nothing, POST, since=(0, 16, 0))
    table.add("/server_info", vllm_infos.server_info, GET)


def _add_weights(table: Table[VllmEngine]) -> None:
    table.add("/init_weight_transfer_engine", vllm_weights.init, POST, since=(0, 16, 0))
    table.add("/shutdown_weight_transfer_engine", vllm_weights.shutdown, POST, since=(0, 32, 0))
    table.add("/start_weight_update", vllm_weights.start, POST, since=vllm_weights.SESSION_SINCE)
    table.add("/update_weights", vllm_weights.update, POST, since=(0, 16, 0))
    table.add("/finish_weight_update", vllm_weights.finish, POST, since=vllm_weights.SESSION_SINCE)
    table.add("/update_weight_version", vllm_weights.set_version, POST, since=(0, 27, 0))
    table.add("/weight_info", vllm_weights.info, GET, since=(0, 27, 0))
    table.add("/weight_checker", vllm_weights.checker, POST, since=vllm_weights.CHECKED_SINCE)
    table.add("/collective_rpc", vllm_weights.collective_rpc, POST)
    table.add("/get_world_size", vllm_weights.world_size, GET, since=(0, 16, 0))
