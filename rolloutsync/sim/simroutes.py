"""`/sim/*`: the simulation's own endpoints, which no real engine has."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.faults import Fault
from rolloutsync.sim.ledger import Ledger, Record
from rolloutsync.sim.replies import json_response, value_error


async def state(engine: Engine, _: Request) -> Response:
    """Answers `/sim/state`: what happened since the start or the last reset."""
    engine.tick()
    return json_response(snapshot(engine))


def snapshot(engine: Engine) -> dict[str, Any]:
    """Returns counters and every generation as JSON values."""
    scheduler, ledger = engine.scheduler, engine.ledger
    steps = [rank.step_s for rank in scheduler.ranks]
    loads = scheduler.live_loads()
    rows = [record.row(scheduler.now, steps) for record in ledger.records]
    return {
        "generations": rows,
        "started": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "aborts": {
            "count": ledger.aborts,
            "abort_all": ledger.aborts_all,
            "ignored": ledger.aborts_ignored,
            "rids": ledger.abort_rids,
        },
        "requests": dict(ledger.calls),
        "peak_running": max(rank.peak_running for rank in scheduler.ranks),
        "busy_seconds": sum(rank.busy_s for rank in scheduler.ranks) - ledger.busy_before,
        "running": sum(load.running for load in loads),
        "waiting": sum(load.waiting for load in loads),
        "in_flight": engine.in_flight,
        "live": len(engine.live),
        "paused": engine.paused,
        "frozen": scheduler.frozen,
        "weight_version": scheduler.weight_version,
    }


async def reset(engine: Engine, _: Request) -> Response:
    """Answers `/sim/reset`: forgets what has ended and clears the faults; an idle engine is as new."""
    live: list[Record] = [live.record for live in engine.live.values()]
    engine.faults.clear()
    engine.healthy = True
    if not live:
        engine.start_over()
    engine.ledger = Ledger(busy_before=sum(rank.busy_s for rank in engine.scheduler.ranks))
    engine.ledger.records.extend(live)
    for rank in engine.scheduler.ranks:
        rank.peak_running = len(rank.running) + len(rank.prefill.requests)
    return json_response(None)


async def faults(engine: Engine, request: Request) -> Response:
    """Answers `/sim/faults`: POST switches one on, GET lists them, DELETE switches one (`?id=`) or all off."""
    if request.method == "POST":
        try:
            fault = Fault.from_dict(await request.json())
        except (ValueError, TypeError) as error:
            raise value_error(str(error)) from error
        entry = engine.faults.add(fault)
        if fault.kind == "freeze" and fault.seconds:
            asyncio.get_running_loop().call_later(fault.seconds, engine.faults.clear, entry.number)
        return json_response(entry.row())
    if request.method == "DELETE":
        number = request.query_params.get("id")
        engine.faults.clear(None if number is None else int(number))
    return json_response(engine.faults.rows())
