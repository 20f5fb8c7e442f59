"""A small router of our own: lists workers in every form, passes generates on to some of them, drops what it likes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import requests

from rolloutsync.routers import KEPT_FIELDS
from tests.client.kit import body_of
from tests.wire import Request, Script, WireServer, answer, play

KEY = "x-smg-routing-key"
_NOT_FOUND: Script = [answer(b"", "404 Not Found")]


def entries(urls: Iterable[str], kind: str = "regular", **facts: Any) -> list[dict[str, Any]]:
    """Workers as the newer routers list them."""
    return [{"url": url, "worker_type": kind, "is_healthy": True, "model_id": "m", **facts} for url in urls]


def disaggregated(urls: Sequence[str]) -> list[dict[str, Any]]:
    """The first one prefills, the others decode."""
    return entries(urls[:1], "prefill", bootstrap_port=8998) + entries(urls[1:], "decode")


class FakeRouter:
    """Answers the list; a generate goes to the worker that decodes for its key, without what routers do not know.

    Args:
        workers: What it lists; may be changed.
        lists: How the list is answered, by path.
        keys: A request that lists must bear one of these.
    """

    def __init__(
        self,
        workers: Iterable[Any] = (),
        *,
        lists: Callable[[str, list[Any]], Script] | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self.workers = list(workers)
        self._lists = lists or newer
        self._keys = keys
        self._homes: dict[str, str] = {}
        self._turn = itertools.count()
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Connection"] = "close"
        self.sent: list[tuple[str | None, str]] = []  # the key of each request that was passed on, and where to
        self.server = WireServer([play(self._choose)])

    def __enter__(self) -> FakeRouter:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
        self._session.close()

    @property
    def url(self) -> str:
        return self.server.url

    def asked(self) -> list[str]:
        """Methods and paths of all requests."""
        with self.server.changed:
            return [f"{request.method} {request.path}" for request in self.server.requests]

    def passed_on(self, key: str) -> list[str]:
        """Where the requests of one key went."""
        return [url for name, url in self.sent if name == key]

    def keys(self) -> list[str]:
        return sorted({key for key, _ in self.sent if key is not None})

    def _choose(self, request: Request) -> Script:
        if request.path in {"/workers", "/list_workers"}:
            word = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self._keys and word not in self._keys:
                return [answer(b"", "401 Unauthorized")]
            return self._lists(request.path, self.workers)
        if request.path == "/generate":
            return self._pass_on(request)
        return [answer(b"OK")] if request.path == "/health" else _NOT_FOUND

    def _pass_on(self, request: Request) -> Script:
        key = request.headers.get(KEY)
        urls = [worker["url"] for worker in self.workers if worker["worker_type"] != "prefill"]
        chosen = urls[next(self._turn) % len(urls)]
        if key is not None:
            chosen = self._homes.setdefault(key, chosen)
        self.sent.append((key, chosen))
        known = {*KEPT_FIELDS, "rid", "input_ids", "text", "sampling_params"}
        body = {name: value for name, value in body_of(request).items() if name in known}
        try:
            reply = self._session.post(f"{chosen}/generate", json=body, timeout=30)
        except requests.RequestException as error:
            return [answer(str(error).encode(), "500 Internal Server Error")]
        return [answer(reply.content, f"{reply.status_code} {reply.reason}", "Content-Type: application/octet-stream")]


def newer(path: str, workers: list[Any]) -> Script:
    """sglang-router 0.3.2 and smg 1.13."""
    return _json({"workers": workers, "total": len(workers)}) if path == "/workers" else _NOT_FOUND


def older(path: str, workers: list[Any]) -> Script:
    """Routers that know bare URLs alone."""
    return _json({"urls": [worker["url"] for worker in workers]}) if path == "/list_workers" else _NOT_FOUND


def _json(value: Any) -> Script:
    return [answer(json.dumps(value).encode())]
