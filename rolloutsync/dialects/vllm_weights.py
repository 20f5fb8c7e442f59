"""vLLM's weight calls, 0.16 to 0.33; all of them want VLLM_SERVER_DEV_MODE=1.

A broadcast goes through the engine's weight transfer engine, of which there is one, set up when the server is started
(``--weight-transfer-config``): the names of groups and backends mean nothing to it, and its trainer side is vLLM's own.
Sessions exist from 0.21 on, labels from 0.27, checksums from 0.32.
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from rolloutsync.dialects.base import Call, Facts, clip_words, post
from rolloutsync.dialects.vllm_request import known_version
from rolloutsync.errors import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PAUSES = {"abort": "keep", "hold": "keep", "wait": "wait"}  # after a drain nothing is left to keep
_LABELS_SINCE = (0, 27)
_HANDLES = ("names", "dtype_names", "shapes")  # without them handles cannot be read
_OPEN = "already active"
_LEAVE = "/shutdown_weight_transfer_engine"


_post = partial(post, long=True, option=orjson.OPT_SERIALIZE_NUMPY)


class VLLMWeights:
    """See ``WeightDialect``. Stateless."""

    modes = tuple(_PAUSES)
    begin = _post("/start_weight_update", {})
    end = _post("/finish_weight_update", {})
    checksum = _post("/weight_checker", {"action": "checksum"})

    def pause_mode(self, mode: str) -> str:
        """See ``WeightDialect.pause_mode``."""
        if mode not in _PAUSES:
            raise ValueError(f"mode must be one of {self.modes}, got {mode!r}")
        return _PAUSES[mode]

    def from_disk(self, path: str, fields: Mapping[str, Any]) -> Call:
        """See ``WeightDialect.from_disk``. ``fields`` go to the worker's ``reload_weights``."""
        return _post("/collective_rpc", {"method": "reload_weights", "kwargs": {**fields, "weights_path": path}})

    def from_tensor(self, tensors: Sequence[str | bytes], fields: Mapping[str, Any]) -> Call:
        """See ``WeightDialect.from_tensor``: pickled IPC handles, of all ranks at once or one text for each rank.

        Raises:
            ValueError: ``names``, ``dtype_names`` or ``shapes`` is missing in the fields.
        """
        missing = [name for name in _HANDLES if name not in fields]
        if missing:
            raise ValueError(f"vLLM needs {', '.join(missing)} beside the tensors' handles, got {shown(list(fields))}")
        ranks = [{**fields, "ipc_handles_pickled": text} for text in dict.fromkeys(map(_text, tensors))]
        return _post("/update_weights", {"update_info": ranks[0] if len(ranks) == 1 else ranks})

    def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,  # noqa: ARG002 - there is one only
        fields: Mapping[str, Any],
    ) -> Call:
        """See ``WeightDialect.from_distributed``. ``fields`` are such as ``packed=True``."""
        told = {
            "names": list(names),
            "dtype_names": list(dtypes),
            "shapes": [list(map(int, shape)) for shape in shapes],
        }
        return _post("/update_weights", {"update_info": {**fields, **told}})

    def set_version(self, version: str) -> Call:
        """See ``WeightDialect.set_version``."""
        return _post("/update_weight_version", {"new_version": version}, long=False)

    def init_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,  # noqa: ARG002 - there is one only
        backend: str,  # noqa: ARG002 - the server's own
    ) -> Call:
        """See ``WeightDialect.init_group``."""
        where = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        return _post("/init_weight_transfer_engine", {"init_info": where})

    def destroy_group(self, name: str) -> Call:  # noqa: ARG002 - there is one only
        """See ``WeightDialect.destroy_group``."""
        return _post(_LEAVE, {})

    def refusal(self, answer: Any) -> str | None:
        """See ``WeightDialect.refusal``."""
        if not isinstance(answer, dict):
            return None
        refused = answer.get("success") is False or answer.get("error")
        return clip_words(answer.get("error") or answer.get("message") or answer) if refused else None

    def applied(self, status: int, words: str) -> bool:  # noqa: ARG002 - vLLM knows no such error
        """See ``WeightDialect.applied``."""
        return False

    def already_open(self, words: str) -> bool:
        """See ``WeightDialect.already_open``."""
        return _OPEN in words

    def no_such_group(self, words: str) -> bool:
        """See ``WeightDialect.no_such_group``. Up to 0.31 a group cannot be left, only joined anew."""
        return f"{_LEAVE} answered 404" in words or f"{_LEAVE} answered 405" in words

    def read_checksum(self, answer: Any) -> str | None:
        """See ``WeightDialect.read_checksum``: one sum over those of all parameters."""
        told = answer.get("checksums") if isinstance(answer, dict) else None
        if not isinstance(told, dict) or not told:
            return None
        return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def keeps_label(self, facts: Facts) -> bool:
        """See ``WeightDialect.keeps_label``. An unknown version is taken for a new one."""
        version = known_version(facts)
        return not version or version >= _LABELS_SINCE


def _text(tensor: str | bytes) -> str:
    return tensor if isinstance(tensor, str) else base64.b64encode(tensor).decode()
