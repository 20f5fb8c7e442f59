"""The errors of vLLM's API server: one form, and what goes into it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.replies import ApiError, json_response

KINDS = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error(status: int, message: str, *, kind: str | None = None, param: str | None = None) -> ApiError:
    """What a call is answered with that cannot be served."""
    kind = kind or KINDS[status]
    return ApiError(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_value(message: str, param: str | None = None, value: Any = None) -> ApiError:
    """What a value is answered with that is out of range; the field is named behind the message where it is known."""
    extras = [] if param is None else [f"parameter={param}"]
    extras += [] if value is None else [f"value={value}"]
    return error(400, f"{message} ({', '.join(extras)})" if extras else message, param=param)


def plain_error(status: int, message: str) -> ApiError:
    """What an HTTP exception becomes: the status line's own words as type."""
    return error(status, message, kind=HTTPStatus(status).phrase)


def invalid(*details: tuple[str, str, str, Any], because: str | None = None) -> ApiError:
    """What a body of the wrong shape is answered with.

    Args:
        details: Type, field, message and input of each thing that is wrong.
        because: More about it, if there is more.
    """
    more = {} if because is None else {"ctx": {"error": because}}
    rows = [
        {"type": kind, "loc": field, "msg": message, "input": _shown(value), **more}
        for kind, field, message, value in details
    ]
    lines = "".join(f"\n  {row}" for row in rows)
    plural = "" if len(rows) == 1 else "s"
    words = f"{len(rows)} validation error{plural}:{lines}"
    return error(400, words, kind=HTTPStatus.BAD_REQUEST.phrase, param=details[0][1])


def _shown(value: Any) -> Any:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return value


async def http_error(_: Request, exception: Exception) -> Response:
    """Answers what no route takes."""
    assert isinstance(exception, HTTPException)
    answer = plain_error(exception.status_code, exception.detail)
    return json_response(answer.body, answer.status, exception.headers)
