"""vLLM's load and facts answers. What is not certainly zero is never zero."""

from __future__ import annotations

import re
from typing import Any

from rolloutsync.dialects.base import Facts, LoadKind, LoadReading, positive, unknown_load
from rolloutsync.errors import clip

_SERIES = re.compile(r"^vllm:num_requests_(running|waiting)(?=[{\s])(.*)$", re.MULTILINE)
_SAMPLE = re.compile(
    r"""(?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?   # a label's value may hold braces
        [ \t]+(?P<value>[0-9.eE+]+)(?:[ \t]+-?[0-9]+)?[ \t]*\r?""",
    re.VERBOSE,
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')
_RANK = "engine"
_MOST = 2**53  # a gauge is a float: larger ones are no counts
_Counts = dict[frozenset[tuple[str, str]], int]  # by labels


class _NotACountError(Exception):
    pass


def read_metrics(text: Any, dp_size: int) -> LoadReading:
    """A ``/metrics`` answer: requests running and waiting, of every DP rank that this server has."""
    if not isinstance(text, str):
        return unknown_load(f"/metrics is not text: {clip(repr(text), 200)}")
    try:
        running, waiting = _series(text)
    except _NotACountError as error:
        return unknown_load(str(error))
    if not running or running.keys() != waiting.keys():
        return unknown_load(f"/metrics has {len(running)} series of running and {len(waiting)} of waiting requests")
    ranks = len({dict(labels).get(_RANK) for labels in running})
    if ranks < dp_size:
        return unknown_load(f"/metrics has {ranks} ranks, dp_size is {dp_size}")
    counts = sum(running.values()), sum(waiting.values())
    kind = LoadKind.BUSY if any(counts) else LoadKind.ZERO
    return LoadReading(kind=kind, running=counts[0], waiting=counts[1])


def _series(text: str) -> tuple[_Counts, _Counts]:
    found: dict[str, _Counts] = {"running": {}, "waiting": {}}
    for name, rest in _SERIES.findall(text):
        labels, count = _sample(rest)
        if labels in found[name]:
            raise _NotACountError(f"num_requests_{name} is there twice for {dict(labels)}")
        found[name][labels] = count
    return found["running"], found["waiting"]


def _sample(rest: str) -> tuple[frozenset[tuple[str, str]], int]:
    """The labels and the value behind a series' name."""
    match = _SAMPLE.fullmatch(rest)
    value = _count(match["value"]) if match else None
    if match is None or value is None:
        raise _NotACountError(f"not a count of requests: {clip(rest.strip(), 200)}")
    return frozenset(_LABEL.findall(match["labels"] or "")), value


def _count(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if 0 <= value < _MOST and value.is_integer() else None


def read_server_load(answer: Any) -> LoadReading:
    """A ``/load`` answer. It counts only with --enable-server-load-tracking, and says zero without: no proof."""
    said = answer.get("server_load") if isinstance(answer, dict) else answer
    count = positive(said)
    if count is None:
        return unknown_load(f"/load says {clip(repr(said), 200)}, which proves nothing")
    return LoadReading(kind=LoadKind.BUSY, running=count)


def read_facts(answer: Any) -> Facts:
    """What ``/server_info``, ``/v1/models`` or ``/version`` says, None for what it does not."""
    if not isinstance(answer, dict):
        return Facts()
    if isinstance(answer.get("data"), list):
        return Facts(model_path=_root(answer["data"]))
    config = answer.get("vllm_config")
    facts = _of_config(config) if isinstance(config, dict) else Facts()
    version = answer.get("version")
    return Facts(version=version) if isinstance(version, str) and version else facts


def _root(models: list[Any]) -> str | None:
    """The path of the model itself; LoRA adapters are listed behind it, with it as their parent."""
    return next(
        (_text(model.get("root")) for model in models if isinstance(model, dict) and not model.get("parent")), None
    )


def _of_config(config: dict[str, Any]) -> Facts:
    model, parallel, scheduler = (_section(config, f"{name}_config") for name in ("model", "parallel", "scheduler"))
    ranks = _ranks_here(parallel)
    limit, workers = positive(scheduler.get("max_num_seqs")), positive(parallel.get("world_size"))
    every = positive(parallel.get("data_parallel_size")) or 1
    return Facts(
        dp_size=ranks,
        tp_size=None if workers is None else workers * every,
        front_ends=positive(parallel.get("_api_process_count")),
        running_limit=None if limit is None else limit * (ranks or 1),
        model_path=_text(model.get("model")),
    )


def _ranks_here(parallel: dict[str, Any]) -> int | None:
    """DP ranks behind this URL: with an external load balancer each rank has a URL of its own."""
    if parallel.get("data_parallel_external_lb"):
        return 1
    local = "data_parallel_size_local" if parallel.get("data_parallel_hybrid_lb") else "data_parallel_size"
    return positive(parallel.get(local))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
