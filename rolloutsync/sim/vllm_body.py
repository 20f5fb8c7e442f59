"""Bodies of calls to vLLM, and what it says about those that it cannot read."""

from __future__ import annotations

from typing import Any

import orjson

from rolloutsync.sim.vllm_errors import invalid


def json_of(data: bytes) -> Any:
    """Decodes a generation call's body.

    Raises:
        ApiError: It is no JSON, or not there.
    """
    if not data:
        raise invalid(("missing", "body", "Field required", None))
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(("json_invalid", f"body.{error.pos}", "JSON decode error", {})) from error
