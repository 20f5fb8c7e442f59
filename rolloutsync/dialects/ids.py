"""Token ids in answers: strict, and fast for a few as well as for thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.errors import ProtocolError
from rolloutsync.payload import int32_array
from rolloutsync.sample import NO_TOKENS

if TYPE_CHECKING:
    from rolloutsync.sample import IntArray


def token_ids(raw: Any, name: str) -> IntArray:
    """Token ids as JSON has them, as int32.

    Raises:
        ProtocolError: They are not a list of integers that fit; names ``name``.
    """
    if not isinstance(raw, list):
        raise ProtocolError(f"{name} is a {type(raw).__name__}, not a list")
    if not raw:
        return NO_TOKENS
    try:
        return int32_array(raw)
    except OverflowError:
        raise ProtocolError(f"{name} holds an id beyond int32") from None
    except TypeError:
        raise ProtocolError(f"{name} holds something that is not an integer") from None
