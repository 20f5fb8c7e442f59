"""A scripted engine that speaks vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.client.kit import ScriptedEngine, Story, body_of
from tests.faults.kit import echo_ids
from tests.wire import Request, Script, answer

TOKENS, COMPLETIONS, ABORT = "/inference/v1/generate", "/v1/completions", "/abort_requests"
DEAD = b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above).", "code": 500}}'


def prompt_of(request: Request) -> list[int]:
    body = body_of(request)
    ids: list[int] = body.get("token_ids") or body["prompt"]
    return ids


def echo_body(request: Request, **changes: Any) -> bytes:
    """A whole answer of either route that says whose it is; ``changes`` override the choice, None removes."""
    make = _completion if request.path == COMPLETIONS else _tokens
    return json.dumps(make(body_of(request)["request_id"], echo_ids(prompt_of(request)), changes)).encode()


def echo(request: Request, _: int = 0) -> Script:
    return [answer(echo_body(request))]


def _tokens(rid: str, ids: Sequence[int], changes: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in ids]
    return {"request_id": f"generate-tokens-{rid}", "choices": [_choice(ids, {"logprobs": {"content": rows}}, changes)]}


def _completion(rid: str, ids: Sequence[int], changes: Mapping[str, Any]) -> dict[str, Any]:
    columns = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [-0.5] * len(ids)}
    choice = _choice(ids, {"text": "x", "logprobs": columns}, changes)
    return {"id": f"cmpl-{rid}", "object": "text_completion", "choices": [choice]}


def _choice(ids: Sequence[int], own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    whole = {"index": 0, "token_ids": list(ids), "finish_reason": "length", **own, **changes}
    return {key: value for key, value in whole.items() if value is not None}


class VllmEngine(ScriptedEngine):
    """A vLLM engine whose generate routes play a story; everything else is answered as an idle engine does.

    Args:
        story: Gives the steps for a request and its number, from 0.
        missing: Paths that are answered with 404.
        others: Steps for other paths.
    """

    def __init__(
        self, story: Story = echo, *, missing: Sequence[str] = (), others: Mapping[str, Script] | None = None
    ) -> None:
        self._missing = missing
        super().__init__(story, others=others)

    def _choose(self, request: Request) -> Script:
        path = request.path.partition("?")[0]
        if path in self._missing:
            return [answer(b'{"detail": "Not Found"}', "404 Not Found")]
        if path in {TOKENS, COMPLETIONS}:
            return self._story(request, next(self._numbers))
        return self._others[path] if path in self._others else [answer(_ANSWERS.get(path, b"{}"))]

    def asked(self) -> list[str]:
        """The ids of all generate requests, in the order of their arrival."""
        return [body["request_id"] for path in (TOKENS, COMPLETIONS) for body in self.bodies(path)]

    def aborts(self) -> list[list[str]]:
        """The ids of each abort; an empty list: of all."""
        return [body.get("request_ids", []) for body in self.bodies(ABORT)]


_ANSWERS = {
    "/version": b'{"version": "0.33.0"}',
    "/weight_info": b'{"weight_version": "default"}',
    "/metrics": b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n',
    ABORT: b'{"status": "aborted", "aborted": 0}',
}
