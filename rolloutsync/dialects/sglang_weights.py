"""SGLang's weight calls, 0.5.6 to 0.5.23. Every one says itself what it flushes and aborts: nothing.

From 0.5.21 on, tensors and broadcasts are taken only within a session (``begin`` and ``end``); disk needs none, and is
kept out of one: it would be finished twice. The label is not sent along but set when everything has arrived.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from rolloutsync.dialects.base import Call, Facts, clip_words, post

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PAUSES = {"abort": "retract", "hold": "in_place", "retract": "retract"}  # after a drain nothing is left to retract
_QUIET = {"flush_cache": False, "abort_all_requests": False}
_APPLIED = "weights were updated, but"  # 0.5.22: the words of a 400 that speaks of the cache alone
_OPEN = "session is already open"
_NO_GROUP = "group to be destroyed does not exist"


_post = partial(post, long=True, option=orjson.OPT_SERIALIZE_NUMPY)


class SGLangWeights:
    """See ``WeightDialect``. Stateless."""

    modes = tuple(_PAUSES)
    begin = _post("/begin_weight_update", {})
    end = _post("/end_weight_update", {})
    checksum = _post("/weights_checker", {"action": "checksum"})

    def pause_mode(self, mode: str) -> str:
        """See ``WeightDialect.pause_mode``."""
        if mode not in _PAUSES:
            raise ValueError(f"mode must be one of {self.modes}, got {mode!r}")
        return _PAUSES[mode]

    def from_disk(self, path: str, fields: Mapping[str, Any]) -> Call:
        """See ``WeightDialect.from_disk``."""
        return _post("/update_weights_from_disk", {**fields, "model_path": path, **_QUIET})

    def from_tensor(self, tensors: Sequence[str | bytes], fields: Mapping[str, Any]) -> Call:
        """See ``WeightDialect.from_tensor``."""
        body = {**fields, "serialized_named_tensors": [_text(tensor) for tensor in tensors], **_QUIET}
        return _post("/update_weights_from_tensor", body)

    def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        fields: Mapping[str, Any],
    ) -> Call:
        """See ``WeightDialect.from_distributed``."""
        told = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(map(int, shape)) for shape in shapes]}
        return _post("/update_weights_from_distributed", {**fields, **told, "group_name": group_name, **_QUIET})

    def set_version(self, version: str) -> Call:
        """See ``WeightDialect.set_version``. It aborts everything unless told not to."""
        return _post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, long=False)

    def init_group(self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> Call:
        """See ``WeightDialect.init_group``."""
        where = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        return _post("/init_weights_update_group", {**where, "group_name": name, "backend": backend})

    def destroy_group(self, name: str) -> Call:
        """See ``WeightDialect.destroy_group``."""
        return _post("/destroy_weights_update_group", {"group_name": name})

    def refusal(self, answer: Any) -> str | None:
        """See ``WeightDialect.refusal``."""
        refused = isinstance(answer, dict) and answer.get("success") is False
        return clip_words(answer.get("message") or answer) if refused else None

    def applied(self, status: int, words: str) -> bool:
        """See ``WeightDialect.applied``."""
        return status == 400 and _APPLIED in words.lower()

    def already_open(self, words: str) -> bool:
        """See ``WeightDialect.already_open``."""
        return _OPEN in words

    def no_such_group(self, words: str) -> bool:
        """See ``WeightDialect.no_such_group``."""
        return _NO_GROUP in words

    def read_checksum(self, answer: Any) -> str | None:
        """See ``WeightDialect.read_checksum``."""
        told = answer.get("per_engine_checksum") if isinstance(answer, dict) else None
        return told if isinstance(told, str) and told else None

    def keeps_label(self, facts: Facts) -> bool:  # noqa: ARG002 - others need them
        """See ``WeightDialect.keeps_label``."""
        return True


def _text(tensor: str | bytes) -> str:
    return tensor if isinstance(tensor, str) else base64.b64encode(tensor).decode()
