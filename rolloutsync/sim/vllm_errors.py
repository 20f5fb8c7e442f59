"""The errors of vLLM's API server: one form, and what goes into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rolloutsync.sim.replies import ApiError

KINDS = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


@dataclass(frozen=True)
class Detail:
    """One thing that is wrong with a body or a query: its kind, place and message, what was there, more about it."""

    kind: str
    place: str
    message: str
    given: Any = None
    more: Mapping[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        """Returns it as the engine shows it."""
        given = self.given
        shown = f"<{type(given).__name__} of {len(given)} items>" if isinstance(given, list | dict) else str(given)
        row = {"type": self.kind, "loc": self.place, "msg": self.message, "input": shown}
        return row if self.more is None else row | {"ctx": dict(self.more)}


def missing(place: str, given: Any = None) -> Detail:
    """What is wrong where a field is not there."""
    return Detail("missing", place, "Field required", given)


def not_among(place: str, choices: tuple[str, ...], given: Any) -> Detail:
    """What is wrong with a word that is none of the known ones."""
    *most, last = (repr(choice) for choice in choices)
    words = f"{', '.join(most)} or {last}"
    return Detail("literal_error", place, f"Input should be {words}", given, {"expected": words})


def error(status: int, message: str, *, kind: str | None = None, param: str | None = None) -> ApiError:
    """What a call is answered with that cannot be served."""
    kind = kind or KINDS[status]
    return ApiError(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_value(message: str, param: str | None = None, value: Any = None) -> ApiError:
    """What a value is answered with that is out of range; the field is named behind the message where it is known."""
    extras = [] if param is None else [f"parameter={param}"]
    extras += [] if value is None else [f"value={value}"]
    return error(400, f"{message} ({', '.join(extras)})" if extras else message, param=param)


class LateError(ApiError):
    """What the engine behind the API server says, to which a stream has begun already."""


def late(message: str, param: str | None = None, value: Any = None) -> LateError:
    """What a value is answered with that is found to be out of range only there."""
    found = bad_value(message, param, value)
    return LateError(found.status, found.body)


def plain_error(status: int, message: str) -> ApiError:
    """What an HTTP exception becomes: the status line's own words as type."""
    return error(status, message, kind=HTTPStatus(status).phrase)


def invalid(*details: Detail) -> ApiError:
    """What a body of the wrong shape is answered with; the first detail's place is the field that is named."""
    lines = "".join(f"\n  {detail.row()}" for detail in details)
    plural = "" if len(details) == 1 else "s"
    words = f"{len(details)} validation error{plural}:{lines}"
    return error(400, words, kind=HTTPStatus.BAD_REQUEST.phrase, param=details[0].place)
