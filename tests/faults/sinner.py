"""An engine of the kind that leaves sockets in CLOSE_WAIT: large answers with routed experts, and a FIN behind each."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import numpy as np

from tests.faults.kit import echo_body
from tests.steps import patient
from tests.wire import Request, Script, answer, close, wait_for


def raw_base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def with_experts(request: Request, value: object) -> bytes:
    whole = json.loads(echo_body(request))
    whole["meta_info"]["routed_experts"] = value
    return json.dumps(whole).encode()


class Sinner:
    """An engine that sends large routed experts and then closes: half of the connections at once, half when they have
    been idle for a while. With ``count`` it answers only when so many requests are there.
    """

    def __init__(self, rows: int, count: int = 0, *, width: int = 8) -> None:
        self._experts = raw_base64(np.zeros((rows, width), np.int32)).encode()
        self._count = count
        self._all_there = threading.Event()

    def __call__(self, request: Request, number: int) -> Script:
        body = with_experts(request, "EXPERTS").replace(b"EXPERTS", self._experts)
        if number + 1 >= self._count:
            self._all_there.set()
        return [wait_for(self._all_there), answer(body), close if number % 2 else patient(0.3)]
