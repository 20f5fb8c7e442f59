"""`/v1/loads` and `/get_load` in the forms of the versions."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.loads import Load
from rolloutsync.sim.replies import ApiError, internal_error, json_response, object_error, validation_error
from rolloutsync.sim.scheduler import SNAPSHOTS_SINCE

SECTIONS = ("all", "core", "disagg", "lora", "memory", "queues", "spec")
BYTES_PER_TOKEN_GB = 5e-7

Row = dict[str, Any]


async def v1_loads(engine: Engine, request: Request) -> Response:
    """Answers `/v1/loads`."""
    sections = _sections(engine, request.query_params.get("include"))
    snapshots = engine.config.release >= SNAPSHOTS_SINCE
    if not snapshots:
        await engine.thawed()
    rows = [_row(engine, rank, load, sections) for rank, load in enumerate(_loads(engine))]
    wanted = _wanted_rank(request)
    rows = rows if wanted is None else [row for index, row in enumerate(rows) if index == wanted]
    if request.query_params.get("format") == "prometheus":
        return Response(_prometheus(rows), media_type="text/plain; version=0.0.4")
    head = {"timestamp": datetime.now(timezone.utc).isoformat(), "version": engine.config.version}
    if snapshots:
        return json_response(head | {"accelerator": None, "num_accelerators": 1, "loads": rows})
    return json_response(head | {"dp_rank_count": engine.config.dp_size, "loads": rows, "aggregate": _aggregate(rows)})


async def get_load(engine: Engine, _: Request) -> Response:
    """Answers `/get_load`."""
    await engine.thawed()
    stuck = engine.faults.has("stuck_load")
    many = engine.config.dp_size > 1
    return json_response(
        [
            {
                "rid": None,
                "http_worker_ipc": None,
                "dp_rank": rank if many else None,
                "num_reqs": load.running + load.waiting or int(stuck),
                "num_waiting_reqs": load.waiting,
                "num_tokens": load.total_tokens,
                "ts_tic": engine.now(),
            }
            for rank, load in enumerate(engine.scheduler.live_loads())
        ]
    )


def _wanted_rank(request: Request) -> int | None:
    rank = request.query_params.get("dp_rank")
    try:
        return None if rank is None else int(rank)
    except ValueError as error:
        words = "Input should be a valid integer, unable to parse string as an integer"
        raise validation_error(request.url.path, "int_parsing", words, ("query", "dp_rank")) from error


def _loads(engine: Engine) -> list[Load]:
    loads = engine.scheduler.loads()
    engine.tick()
    return loads


def _sections(engine: Engine, include: str | None) -> set[str]:
    wanted = set((include or "all").split(","))
    unknown = wanted - set(SECTIONS)
    if unknown:
        raise _bad_sections(engine, unknown)
    return set(SECTIONS) if "all" in wanted else wanted


def _bad_sections(engine: Engine, unknown: set[str]) -> ApiError:
    if engine.config.release >= SNAPSHOTS_SINCE:
        return internal_error()
    return object_error(400, f"Invalid include sections: {unknown}. Valid options: {list(SECTIONS)}")


def _row(engine: Engine, rank: int, load: Load, sections: set[str]) -> Row:
    capacity = engine.config.max_total_tokens
    running = load.running or int(engine.faults.has("stuck_load"))
    modern = engine.config.release >= SNAPSHOTS_SINCE
    row: Row = {"timestamp": engine.wall(load.at), "dp_rank": rank} if modern else {}
    row |= {"num_running_reqs": running, "num_waiting_reqs": load.waiting}
    if modern:
        row["num_waiting_uncached_tokens"] = load.waiting_uncached_tokens
    row["num_used_tokens"] = load.used_tokens
    if modern:
        row |= {"num_total_tokens": load.total_tokens, "num_active_tokens": load.total_tokens}
        row["num_prealloc_ready_tokens"] = 0
    row |= {
        "max_total_num_tokens": capacity,
        "max_running_requests": engine.config.max_running_requests,
        "token_usage": round(load.used_tokens / capacity, 4),
        "gen_throughput": round(load.throughput, 2),
        "cache_hit_rate": round(load.hit_rate, 4),
        "utilization": 0.0,
    }
    row |= _modern(load) if modern else {"num_total_reqs": running + load.waiting}
    return row | _extra_sections(capacity, load, sections, modern=modern)


def _modern(load: Load) -> Row:
    steps = load.decode_steps
    return {
        "total_prefill_uncached_tokens": load.prefilled_tokens,
        "total_prefill_busy_us": int(load.prefill_busy_s * 1e6),
        "decode_moments": [float(steps), 0.0, 0.0, 0.0, 0.0, 0.0] if steps else None,
    }


def _extra_sections(capacity: int, load: Load, sections: set[str], *, modern: bool) -> Row:
    extra: Row = {}
    if "memory" in sections:
        size = round(capacity * BYTES_PER_TOKEN_GB, 3)
        extra["memory"] = {"weight_gb": 0.0, "kv_cache_gb": size, "graph_gb": 0.0, "token_capacity": capacity}
    if "disagg" in sections:
        prealloc = "bootstrap" if modern else "prealloc"
        extra["disaggregation"] = {
            "mode": "null",
            f"prefill_{prealloc}_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        }
    if "queues" in sections:
        queues = {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0}
        extra["queues"] = queues | ({"prealloc_ready": 0} if modern else {})
    return extra


def _aggregate(rows: list[Row]) -> Row:
    count = len(rows) or 1
    return {
        "total_running_reqs": sum(row["num_running_reqs"] for row in rows),
        "total_waiting_reqs": sum(row["num_waiting_reqs"] for row in rows),
        "total_reqs": sum(row["num_total_reqs"] for row in rows),
        "avg_token_usage": round(sum(row["token_usage"] for row in rows) / count, 4),
        "avg_throughput": round(sum(row["gen_throughput"] for row in rows) / count, 2),
        "avg_utilization": 0.0,
    }


def _prometheus(rows: list[Row]) -> str:
    lines: list[str] = []
    for row in rows:
        rank = row.get("dp_rank", 0)
        for name, value in _flat(row):
            if name != "dp_rank" and isinstance(value, int | float):
                lines += [f"# TYPE sglang_{name} gauge", f'sglang_{name}{{dp_rank="{rank}"}} {value}']
    return "\n".join(lines) + "\n"


def _flat(row: Row) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in row.items():
        if isinstance(value, dict):
            prefix = "disagg" if name == "disaggregation" else name
            pairs += [(f"{prefix}_{inner}", number) for inner, number in value.items()]
        else:
            pairs.append((name, value))
    return pairs
