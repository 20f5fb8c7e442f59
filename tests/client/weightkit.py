"""A scripted engine that takes weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.client.kit import ScriptedEngine, body_of
from tests.wire import Request, Script, answer

GOOD = {"success": True, "message": "Success"}
STEPS = ("pause_generation", "continue_generation", "weight", "flush_cache")


class WeightEngine(ScriptedEngine):
    """Answers weight calls as an engine does, and bears the label that it was given.

    Args:
        others: Steps for other paths.
        deaf: It keeps the label that it has.
        info: More fields of /server_info.
    """

    def __init__(self, others: Mapping[str, Script] | None = None, *, deaf: bool = False, **info: Any) -> None:
        super().__init__(others=others, **{"tp_size": 1, **info})
        self.label = "default"
        self._deaf = deaf

    def _choose(self, request: Request) -> Script:
        if request.path in self._others:
            return self._others[request.path]
        if request.path == "/update_weight_version" and not self._deaf:
            self.label = body_of(request)["new_version"]
        if request.path == "/model_info":
            return [answer(json.dumps({"weight_version": self.label}).encode())]
        if "weight" in request.path:
            return [answer(json.dumps({**GOOD, "per_engine_checksum": "c0ffee"}).encode())]
        return super()._choose(request)

    def steps(self) -> list[str]:
        """The calls that concern weights, in order."""
        return [path[1:] for path in self.server.paths() if any(step in path for step in STEPS)]
