"""Calls to an engine that speaks vLLM, and what its answers hold."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from .kit import Caller, Reply

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


class VllmCaller(Caller):
    """Calls one engine; `tokens` blocks, `begin_tokens` runs on a thread."""

    def tokens(self, ids: Sequence[int], count: int | None, **fields: Any) -> Reply:
        """Generates exactly `count` tokens, unless something ends it."""
        return self.post(GENERATE, asked(ids, count, **fields))

    def begin_tokens(self, ids: Sequence[int], count: int | None, **fields: Any) -> Future[Reply]:
        """Generates on a thread."""
        return self.begin(GENERATE, asked(ids, count, **fields))

    def begin_running(self, ids: Sequence[int], rid: str, **fields: Any) -> Future[Reply]:
        """Starts a long generation and waits until it runs."""
        call = self.begin_tokens(ids, 1900, request_id=rid, **fields)
        self.await_row(rid, "running")
        return call

    def complete(self, prompt: Any, **fields: Any) -> Reply:
        """Makes a completion."""
        return self.post(COMPLETIONS, {"prompt": prompt, **fields})

    def wire(self, body: Any, headers: Mapping[str, str]) -> AbstractContextManager[socket.socket]:
        """Sends a generation and yields its socket, which is closed at the end."""
        return self.sent(GENERATE, body, {"Content-Type": "application/json", **headers})

    def abort(self, *ids: str) -> int:
        """Aborts by the engine's own ids, or all; returns how many it says it did."""
        reply = self.post("/abort_requests", {"request_ids": list(ids)})
        assert (reply.status, reply.json["status"]) == (200, "aborted")
        return int(reply.json["aborted"])

    def counts(self, rank: int = 0) -> tuple[int, int]:
        """Running and waiting by the engine's metrics."""
        return int(self.metric("num_requests_running", rank)), int(self.metric("num_requests_waiting", rank))

    def metric(self, name: str, rank: int = 0) -> float:
        """One number of the metrics."""
        found = re.search(rf'^vllm:{name}{{engine="{rank}",[^}}]*}} (.+)$', self.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])


def asked(ids: Sequence[int], count: int | None, **fields: Any) -> dict[str, Any]:
    """The body of a call."""
    limit = {} if count is None else {"max_tokens": count}
    return {
        "token_ids": list(ids),
        "sampling_params": {"ignore_eos": True, **limit, **fields.pop("sampling", {})},
        **fields,
    }


def choice(reply: Reply, index: int = 0) -> Mapping[str, Any]:
    """One sample of an answer, which must be a 200."""
    assert reply.status == 200, reply.text
    found: Mapping[str, Any] = reply.json["choices"][index]
    return found


def ids(reply: Reply, index: int = 0) -> list[int]:
    """The tokens of a sample."""
    found: list[int] = choice(reply, index)["token_ids"]
    return found


def problem(reply: Reply) -> tuple[int, str, str | None]:
    """Status, type and field of an error that has the form of all errors."""
    body = reply.json["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == reply.status
    return reply.status, body["type"], body["param"]
