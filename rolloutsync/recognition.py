"""What answers at a URL: an engine of one family or another, a router, or something that does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.dialects.family import PROBES, family
from rolloutsync.errors import EngineHTTPError, Phase, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.dialects.base import Call
    from rolloutsync.dialects.family import Family

_BROKEN = {Phase.RACE, Phase.SENT, Phase.BODY}


def recognise(ask: Callable[[Call], Any]) -> Family | None:
    """The family of a server, or None where no probe tells: a mock, or a gateway in front of nothing.

    Args:
        ask: Makes one call; its errors are those of ``Engine.call``.

    Raises:
        TransportError: It cannot be reached, or is silent: nothing is known of it.
    """
    answers: dict[str, Any] = {}
    for call in PROBES:
        answers[call.path] = _answer(ask, call)
        if (found := family(answers)) is not None:
            return found
    return None


def _answer(ask: Callable[[Call], Any], call: Call) -> Any:
    """None for an error answer, and where the exchange broke, as everything does that a mock does not know."""
    try:
        return ask(call)
    except EngineHTTPError:
        return None
    except TransportError as error:
        if error.cut is not None or error.phase not in _BROKEN:
            raise
        return None
