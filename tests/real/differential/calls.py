"""Calls that are answered at once and change nothing: looks, flushes, and what no endpoint takes."""

from __future__ import annotations

from .steps import Step, call

LOOKS: list[Step] = [
    call("the load", "/v1/loads", method="GET"),
    call("the load, core", "/v1/loads?include=core", method="GET"),
    call("the load, two sections", "/v1/loads?include=memory,queues", method="GET"),
    call("the load, all sections", "/v1/loads?include=all", method="GET"),
    call("the load of rank 0", "/v1/loads?dp_rank=0", method="GET"),
    call("the load of a rank that is not there", "/v1/loads?dp_rank=5", method="GET"),
    call("the load of a rank that is a word", "/v1/loads?dp_rank=x", method="GET"),
    call("the load, a section that is not there", "/v1/loads?include=nothing", method="GET"),
    call("the load as metrics", "/v1/loads?format=prometheus", method="GET"),
    call("the load in another format", "/v1/loads?format=xml", method="GET"),
    call("the load, posted", "/v1/loads", {}),
    call("the old load", "/get_load", method="GET"),
    call("the model", "/model_info", method="GET"),
    call("the model, by its old name", "/get_model_info", method="GET"),
    call("the models", "/v1/models", method="GET"),
    call("the weight version", "/weight_version", method="GET"),
    call("the weight version, by its old name", "/get_weight_version", method="GET"),
    call("ready", "/ready", method="GET"),
    call("ping", "/ping", method="GET"),
]

FLUSHES: list[Step] = [
    call("flush", "/flush_cache"),
    call("flush by GET", "/flush_cache", method="GET"),
    call("flush with a body", "/flush_cache", {}),
    call("flush and wait", "/flush_cache?timeout=0.2"),
    call("flush and wait for a word", "/flush_cache?timeout=x"),
    call("flush and wait below zero", "/flush_cache?timeout=-1"),
]

BAD_CALLS: list[Step] = [
    call("an abort without a body", "/abort_request"),
    call("an abort of nothing", "/abort_request", {}),
    call("an abort of null", "/abort_request", {"rid": None}),
    call("an abort of a number", "/abort_request", {"rid": 5}),
    call("an abort of a list", "/abort_request", {"rid": ["a", "b"]}),
    call("an abort that is a list", "/abort_request", ["a"]),
    call("an abort of all that is a word", "/abort_request", {"abort_all": "perhaps"}),
    call("an abort of broken JSON", "/abort_request", b'{"rid": '),
    call("an abort by GET", "/abort_request", method="GET"),
    call("an abort with an unknown field", "/abort_request", {"rid": "nobody", "no_such_field": 1}),
    call("a pause without a body", "/pause_generation"),
    call("a pause in no mode", "/pause_generation", {"mode": "nap"}),
    call("a pause in mode null", "/pause_generation", {"mode": None}),
    call("a pause of broken JSON", "/pause_generation", b"{"),
    call("a pause by GET", "/pause_generation", method="GET"),
    call("a continue without a body", "/continue_generation"),
    call("a continue by GET", "/continue_generation", method="GET"),
    call("a continue that is a list", "/continue_generation", []),
    call("a generation by GET", "/generate", method="GET"),
    call("a generation by DELETE", "/generate", method="DELETE"),
    call("an unknown route", "/no_such_route", method="GET"),
    call("an unknown route, posted", "/no_such_route", {}),
    call("a route with a slash too many", "/generate/", {}),
    call("the root", "/", method="GET"),
    call("a model that is posted", "/model_info", {}),
    call("ready, posted", "/ready", {}),
]
