"""Which paths an SGLang engine answers, by version."""

from __future__ import annotations

from rolloutsync.sim import controls, infos, loadviews, weightroutes
from rolloutsync.sim.engine import Engine
from rolloutsync.sim.generate import GenerateEndpoint
from rolloutsync.sim.openai import ROUTES, OpenAIEndpoint
from rolloutsync.sim.routes import BOTH, GET, POST, Table


def add_routes(table: Table[Engine]) -> None:
    """Adds all of them."""
    generate = GenerateEndpoint(table.engine)
    table.mount("/generate", generate, ("POST", "PUT"))
    for route in ROUTES:
        table.mount(route.path, OpenAIEndpoint(table.engine, generate, route), POST)
    _add_infos(table)
    _add_controls(table)
    _add_weights(table)
    if table.engine.config.enable_metrics:
        _add_metrics(table)


def _add_infos(table: Table[Engine]) -> None:
    table.add("/", infos.root, GET, since=infos.ROOT_SINCE)
    table.add("/model_info", infos.model_info, GET, since=(0, 5, 6))
    table.add("/get_model_info", infos.model_info, GET)
    table.add("/server_info", infos.server_info, GET, since=(0, 5, 6))
    table.add("/get_server_info", infos.server_info, GET)
    table.add("/v1/models", infos.models, GET)
    table.add("/v1/models/{model:path}", infos.model, GET)
    table.add("/get_weight_version", infos.weight_version, GET, since=(0, 5, 1), until=(0, 5, 21))
    table.add("/weight_version", infos.weight_version, GET, since=(0, 5, 6), until=(0, 5, 21))
    table.add("/health", infos.health, GET)
    table.add("/health_generate", infos.health, GET)
    table.add("/ping", infos.ping, GET)
    table.add("/ready", infos.ready, GET, since=(0, 5, 20))
    table.add("/v1/loads", loadviews.v1_loads, GET, since=(0, 5, 8))
    table.add("/get_load", loadviews.get_load, GET, since=(0, 4, 7), until=(0, 5, 21))


def _add_controls(table: Table[Engine]) -> None:
    table.add("/abort_request", controls.abort, POST, guarded=True)
    table.add("/pause_generation", controls.pause, POST, since=(0, 4, 9), guarded=True)
    table.add("/continue_generation", controls.resume, POST, since=(0, 4, 9), guarded=True)
    table.add("/flush_cache", controls.flush, BOTH, guarded=True)
    table.add("/release_memory_occupation", controls.release_memory, BOTH, guarded=True)
    table.add("/resume_memory_occupation", controls.resume_memory, BOTH, guarded=True)
    table.add("/slow_down", controls.slow_down, BOTH, guarded=True)


def _add_weights(table: Table[Engine]) -> None:
    table.add("/update_weights_from_disk", weightroutes.from_disk, POST, guarded=True)
    table.add("/update_weights_from_tensor", weightroutes.from_tensor, POST, guarded=True)
    table.add("/update_weights_from_distributed", weightroutes.from_distributed, POST, guarded=True)
    table.add("/weights_checker", weightroutes.checker, BOTH, guarded=True)
    table.add("/begin_weight_update", weightroutes.begin, POST, since=weightroutes.SESSION_SINCE, guarded=True)
    table.add("/end_weight_update", weightroutes.end, POST, since=weightroutes.SESSION_SINCE, guarded=True)
    table.add("/init_weights_update_group", weightroutes.init_group, POST, guarded=True)
    table.add("/destroy_weights_update_group", weightroutes.destroy_group, POST, since=(0, 5, 4), guarded=True)
    table.add("/update_weight_version", weightroutes.set_version, POST, since=(0, 5, 1), guarded=True)


def _add_metrics(table: Table[Engine]) -> None:
    from rolloutsync.sim.metrics import metrics  # noqa: PLC0415 - only who wants metrics needs prometheus-client

    table.add("/metrics", metrics, GET)
