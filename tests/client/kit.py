"""What the client tests share: prompts with known continuations, and a scripted engine for faults on the wire."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from rolloutsync import RetryPolicy, Sample, Timeouts
from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokens import expected_logprobs, expected_tokens
from tests.wire import Request, Script, WireServer, answer, close, head_of, play, silence

T = TypeVar("T")
QUICK = RetryPolicy(backoff_base_s=0.02, backoff_cap_s=0.1)
SHORT = Timeouts(connect_s=2.0, control_s=2.0, sample_s=20.0, engine_wait_s=1.0)


def params(tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Exactly so many tokens."""
    return {"max_new_tokens": tokens, "ignore_eos": True, **more}


ENDLESS = params(30_000)


def prompts(count: int, length: int = 5) -> list[list[int]]:
    """Different prompts of known ids."""
    return [[3 + index, *range(10, 9 + length)] for index in range(count)]


def check_sample(sample: Sample, ids: Sequence[int], tokens: int = 8, **options: Any) -> None:
    """A whole sample is exactly what the engine must have said."""
    assert sample.error is None
    wanted = expected_tokens(ids, tokens, **options)
    assert sample.output_ids.tolist() == wanted
    assert sample.logprobs is not None
    assert sample.logprobs.tolist() == np.array(expected_logprobs(ids, wanted), np.float32).tolist()
    assert sample.finish is not None
    assert (sample.status, sample.finish.type) == ("TRUNCATED", "length")


def generations(fleet: SimFleet) -> list[dict[str, Any]]:
    """Every generation that an engine of the fleet started, with the engine's number."""
    states = [engine.state() for engine in fleet.engines]
    return [row | {"engine": number} for number, state in enumerate(states) for row in state["generations"]]


def calls(fleet: SimFleet, path: str) -> int:
    """How often a path was called, over the fleet."""
    return sum(engine.state()["requests"].get(path, 0) for engine in fleet.engines)


# --- a scripted engine ------------------------------------------------------------------------------------------------

Story = Callable[[Request, int], Script]


def body_of(request: Request) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(request.body or b"{}")
    return value


def completion(request: Request, tokens: int = 2, *, ids: Sequence[int] | None = None, **meta: Any) -> bytes:
    """The JSON of a whole answer to a /generate request, with these output ids or with so many from 100 on."""
    body = body_of(request)
    ids = list(range(100, 100 + tokens)) if ids is None else list(ids)
    info = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": len(body.get("input_ids") or [1]),
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        **meta,
    }
    return json.dumps({"text": "x" * len(ids), "output_ids": ids, "meta_info": info}).encode()


def good(request: Request, _: int = 0) -> Script:
    """A whole answer."""
    return [answer(completion(request))]


def quiet(request: Request, _: int = 0) -> Script:
    """No answer."""
    return [silence]


E = TypeVar("E", bound="ScriptedEngine")


class ScriptedEngine:
    """An engine whose /generate plays a story for each request; everything else is answered as an idle engine does.

    Args:
        story: Gives the steps for a /generate request and its number, from 0.
        others: Bytes or steps for other paths.
        backlog: Of the listen queue.
        accepting: Connections are accepted only while it is set.
        closing: Closes every connection after its first answer.
        info: More fields of /server_info.
    """

    def __init__(
        self,
        story: Story = good,
        *,
        others: Mapping[str, Script] | None = None,
        backlog: int = 512,
        accepting: threading.Event | None = None,
        closing: bool = False,
        **info: Any,
    ) -> None:
        self._story = story
        self._others = others or {}
        self._info = {"version": "0.5.23", "dp_size": 1, **info}
        self._numbers = itertools.count()
        self._stamps = itertools.count(1)
        self._last: Script = [close] if closing else []
        self.server = WireServer([play(self._choose)], backlog=backlog, accepting=accepting)

    def __enter__(self: E) -> E:  # noqa: PYI019 - typing.Self is 3.11
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.server.close()

    @property
    def url(self) -> str:
        return self.server.url

    def _choose(self, request: Request) -> Script:
        path = request.path.partition("?")[0]
        if path == "/generate":
            return [*self._story(request, next(self._numbers)), *self._last]
        if path in self._others:
            return self._others[path]
        return [answer(json.dumps(self._facts(path)).encode()), *self._last]

    def _facts(self, path: str) -> Any:
        if path == "/v1/loads":
            rank = {"dp_rank": 0, "timestamp": float(next(self._stamps)), "num_running_reqs": 0, "num_waiting_reqs": 0}
            return {"loads": [rank]}
        return self._info if path == "/server_info" else {}

    def bodies(self, path: str = "/generate") -> list[dict[str, Any]]:
        """The bodies of all requests to a path, in the order of their arrival."""
        with self.server.changed:
            return [body_of(request) for request in self.server.requests if request.path == path]

    def rids(self) -> list[str]:
        return [body["rid"] for body in self.bodies()]

    def aborted(self) -> list[str]:
        return [body.get("rid", "") for body in self.bodies("/abort_request")]

    def counts(self) -> Counter[str]:
        return Counter(self.server.paths())


def error_answer(status: str, body: bytes = b'{"error": {"message": "no"}}', *headers: str) -> Script:
    """An answer with an error status."""
    return [answer(body, status, *headers)]


def raw_answer(data: bytes) -> bytes:
    return head_of(data) + data
