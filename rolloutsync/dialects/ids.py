"""Token ids in answers: strict, and fast for a few as well as for thousands."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from rolloutsync.errors import ProtocolError
from rolloutsync.sample import NO_TOKENS

if TYPE_CHECKING:
    from rolloutsync.sample import IntArray

FEW = 512  # numbers, for which Python's own loops are faster than a call into numpy's more distant parts


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
        ids = np.array(array("i", raw))  # of all ways the strictest
    except OverflowError:
        raise ProtocolError(f"{name} holds an id beyond int32") from None
    except TypeError:
        raise ProtocolError(f"{name} holds something that is not an integer") from None
    least = min(raw) if len(raw) <= FEW else ids.min()
    if least <= 1 and bool in set(map(type, raw)):  # true and false are 1 and 0 to it
        raise ProtocolError(f"{name} holds something that is not an integer")
    return ids
