"""What the tests of weights share: a scripted engine that takes them, and what is looked at again and again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rolloutsync import RolloutClient
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.fleet import SimEngine
from tests.client.kit import ScriptedEngine, body_of
from tests.wire import Request, Script, answer

GOOD = {"success": True, "message": "Success"}
DISK, TENSOR, SENT = "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"
BUCKET: tuple[Any, ...] = (["w"], ["torch.bfloat16"], [[2, 3]])
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


@contextmanager
def slowly(engines: Sequence[SimEngine], seconds: float = 0.02) -> Iterator[None]:
    """Every token takes so much longer within the block: what runs there does not end before a test has looked."""
    for engine in engines:
        engine.slow_down(seconds)
    try:
        yield
    finally:
        for engine in engines:
            engine.slow_down(None)


def states(client: RolloutClient) -> list[str]:
    return [str(engine.state) for engine in client.engines()]


def refuse(engine: Any, path: str, **more: Any) -> None:
    engine.add_fault(Fault(kind="status", status=400, path=path, body={"success": False, "message": "no such"}, **more))


def tensors_for(urls: Sequence[str], ranks: int = 1) -> dict[str, list[str]]:
    return {url: ["QQ=="] * ranks for url in urls}


def nothing_is_held(fleet: SimFleet, client: RolloutClient) -> None:
    assert client.stats().gate == "open"
    assert [engine.state()["paused"] for engine in fleet.engines] == [False] * len(fleet)


@contextmanager
def weight_engines(*engines: WeightEngine) -> Iterator[list[WeightEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(engine) for engine in engines]
