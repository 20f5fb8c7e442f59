"""SGLang's load and facts answers. What is not certainly zero is never zero."""

from __future__ import annotations

import math
from typing import Any

from rolloutsync.dialects.base import Facts, LoadKind, LoadReading, positive, unknown_load

_TOKENS = ("num_used_tokens", "num_total_tokens")


class _NotACountError(Exception):
    pass


def read_loads(answer: Any, dp_size: int, *, live: bool) -> LoadReading:
    """A ``/v1/loads`` answer, or with ``live`` one of ``/get_load``."""
    ranks = answer if live else answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return unknown_load(f"unexpected shape: {str(answer)[:200]}")
    told = answer.get("dp_rank_count") if isinstance(answer, dict) else None  # up to 0.5.12
    expected = max(1, dp_size, positive(told) or 1)
    if _distinct(ranks) < expected:
        return unknown_load(f"{len(ranks)} ranks listed, dp_size is {expected}")
    try:
        counts = [_old_rank(rank) if live else _rank(rank) for rank in ranks]
        stamps = _stamps(ranks)
    except _NotACountError as error:
        return unknown_load(str(error))
    running, waiting, tokens = (sum(column) for column in zip(*counts, strict=True))
    kind = LoadKind.BUSY if running or waiting or tokens else LoadKind.ZERO
    return LoadReading(kind=kind, running=running, waiting=waiting, tokens=tokens, stamps=stamps)


def _distinct(ranks: list[dict[str, Any]]) -> int:
    """How many different ranks are listed; those that do not say which they are count as different."""
    named = [rank["dp_rank"] for rank in ranks if isinstance(rank.get("dp_rank"), int)]
    return len(ranks) - len(named) + len(set(named))


def _rank(rank: dict[str, Any]) -> tuple[int, int, int]:
    """(running, waiting, tokens) of one rank of ``/v1/loads``: a request in prefill shows only in the tokens."""
    queued = sum(_count(rank["queues"], key) for key in _section(rank, "queues"))
    parts = _section(rank, "disaggregation")
    moving = sum(_count(rank["disaggregation"], key) for key in parts if key.endswith("_reqs"))
    waiting = max(_count(rank, "num_waiting_reqs", required=True), queued) + moving
    if _count(rank, "num_waiting_uncached_tokens"):
        waiting = max(waiting, 1)  # somebody's tokens wait, even if nobody is counted
    return _count(rank, "num_running_reqs", required=True), waiting, max(_count(rank, key) for key in _TOKENS)


def _old_rank(rank: dict[str, Any]) -> tuple[int, int, int]:
    """The same of one rank of ``/get_load``, whose ``num_reqs`` includes the waiting ones."""
    requests, waiting = _count(rank, "num_reqs", required=True), _count(rank, "num_waiting_reqs", required=True)
    return max(0, requests - waiting), waiting, _count(rank, "num_tokens")


def _section(rank: dict[str, Any], name: str) -> list[str]:
    section = rank.get(name)
    if section is not None and not isinstance(section, dict):
        raise _NotACountError(f"{name} is {section!r}")
    return list(section or ())


def _count(source: dict[str, Any], key: str, *, required: bool = False) -> int:
    if key not in source and not required:
        return 0
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _NotACountError(f"{key} is {value!r}")
    return value


def _stamps(ranks: list[dict[str, Any]]) -> tuple[float, ...] | None:
    stamps = [rank.get("timestamp") for rank in ranks]
    if all(stamp is None for stamp in stamps):
        return None
    for stamp in stamps:
        if isinstance(stamp, bool) or not isinstance(stamp, (int, float)) or not math.isfinite(stamp) or stamp <= 0:
            raise _NotACountError(f"rank timestamp is {stamp!r}")
    return tuple(float(stamp) for stamp in stamps if stamp is not None)


def read_facts(answer: Any) -> Facts:
    """A ``/server_info`` answer: what it says, None for what it does not."""
    if not isinstance(answer, dict):
        return Facts()
    return Facts(
        version=_text(answer.get("version")),
        dp_size=positive(answer.get("dp_size")),
        tp_size=positive(answer.get("tp_size")),
        running_limit=_running_limit(answer),
        model_path=_text(answer.get("model_path")),
        weight_version=_text(answer.get("weight_version")),
        vocab_size=positive(answer.get("vocab_size")),
    )


def _running_limit(answer: dict[str, Any]) -> int | None:
    """Over all ranks: each rank's effective limit where it is told, else the server argument per rank."""
    states = answer.get("internal_states")
    ranks = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    limits = [positive(rank.get("effective_max_running_requests_per_dp")) for rank in ranks]
    told = [limit for limit in limits if limit is not None]
    if told and len(told) == len(ranks):
        return sum(told)
    single = positive(answer.get("max_running_requests"))
    return None if single is None else single * (positive(answer.get("dp_size")) or 1)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
