"""The forms of answers: JSON bodies, the many shapes of errors, and how they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

JSON_TYPE = "application/json"


class ApiError(Exception):
    """An answer that is an error; `body` is JSON, or a string for plain text."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    def response(self) -> Response:
        """Returns it as an answer."""
        if isinstance(self.body, str):
            return Response(self.body, self.status, media_type="text/plain")
        return json_response(self.body, self.status)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a JSON answer."""
    return Response(dumps(body), status, headers, JSON_TYPE)


def dumps(body: Any) -> bytes:
    """Encodes as the engine does: NaN becomes null."""
    return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def value_error(message: str, status: int = 400) -> ApiError:
    """What a request that cannot be right is answered with."""
    return ApiError(status, {"error": {"message": message}})


def object_error(status: int, message: str, kind: str | None = None) -> ApiError:
    """What the scheduler refuses a request with."""
    body = {"object": "error", "message": message, "type": kind or str(status), "param": None, "code": status}
    return ApiError(status, body)


def validation_error(path: str, kind: str, message: str, location: tuple[str | int, ...] = ("body",)) -> ApiError:
    """What a body of the wrong shape is answered with."""
    detail = str({"type": kind, "loc": location, "msg": message})
    text = (
        f'1 validation error:\n  {detail}\n\n  File "http_server.py", line 1, in endpoint\n    POST {path} [{detail}]'
    )
    return object_error(400, text, HTTPStatus.BAD_REQUEST.phrase)


def missing_body(path: str) -> ApiError:
    """What a call without its body is answered with."""
    return validation_error(path, "missing", "Field required")


def internal_error() -> ApiError:
    """What an uncaught exception is answered with."""
    return ApiError(500, "Internal Server Error")


def loads_body(data: bytes, path: str) -> Any:
    """Decodes a body.

    Raises:
        ApiError: It is no JSON, or not there.
    """
    if not data:
        raise missing_body(path)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise validation_error(path, "json_invalid", "JSON decode error", ("body", error.pos)) from error
