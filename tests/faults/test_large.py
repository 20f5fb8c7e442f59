"""B26, B28 and the original sin: large requests that are refused half-way, large answers with routed experts."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import requests
from requests.adapters import HTTPAdapter

from rolloutsync import EngineHTTPError, ProtocolError, Status, TransportError
from tests.client.kit import ScriptedEngine, body_of, prompts
from tests.faults.engine import LiveEngine
from tests.faults.kit import IMPATIENT, MakeClient, check, check_all, check_failed, echo, echo_body, within
from tests.faults.sinner import Sinner, raw_base64, with_experts
from tests.kernel import client_states
from tests.transport.kit import all_at_once, reservations
from tests.wire import (
    Peer,
    Request,
    Script,
    WireServer,
    answer,
    close,
    eventually,
    play,
    read_bytes,
    reset,
    silence,
)

MIB = 1 << 20
WIDE = np.arange(1_300_000, dtype=np.int32)  # a request of about 9 MB
SMALL = [play(lambda _: [answer()])]

# --- B28: refused before all of it was sent ---------------------------------------------------------------------------

LIMIT = b"payload reached size limit"
EARLY: dict[str, tuple[Script, str]] = {
    "413 and close": ([answer(LIMIT, "413 Payload Too Large"), close], "answered 413: payload reached size limit"),
    "413 and keep": ([answer(LIMIT, "413 Payload Too Large"), silence], "answered 413: payload reached size limit"),
    "400 and keep": ([answer(b'{"error": {"message": "no"}}', "400 Bad Request"), silence], "answered 400: no"),
}


@pytest.mark.parametrize("name", EARLY)
def test_an_early_refusal_is_final(client_to: MakeClient, name: str) -> None:
    """B28: the engine has read 4 kB of 9 MB; its words are the sample's error, after one attempt, and the socket, in
    which our rest lies unread, serves nobody else.
    """
    steps, words = EARLY[name]
    with WireServer(SMALL, [read_bytes(4096), *steps], [play(echo)]) as server:
        client = client_to(server.url)
        client.engines()
        samples = client.generate([WIDE], on_error="return")
        check_failed(samples[0], EngineHTTPError, words, attempts=1)
        check(client.generate([[5, 6]])[0], [5, 6])
        assert [request.connection for request in server.requests if request.path == "/generate"] == [2]


def test_an_early_answer_is_an_answer(client_to: MakeClient) -> None:
    """B28: a whole answer, with our id, while we still send: taken, and its socket serves nobody else."""

    def answer_early(peer: Peer) -> None:
        read_bytes(4096)(peer)
        rid = re.search(rb'"rid":"([0-9a-f]{32})"', peer.taken)
        assert rid is not None
        request = Request("POST", "/generate", {}, b'{"rid": "%s", "input_ids": [0, 1]}' % rid[1], 0)
        peer.send_answer(echo_body(request))

    with WireServer(SMALL, [answer_early, silence], [play(echo)]) as server:
        client = client_to(server.url)
        client.engines()
        sample = client.generate([WIDE])[0]
        assert (sample.status, sample.attempts, sample.output_ids.tolist()) == (Status.TRUNCATED, 1, [1000, 2, 2001])
        check(client.generate([[5, 6]])[0], [5, 6])
        assert [request.connection for request in server.requests if request.path == "/generate"] == [2]


def test_an_early_reset_is_no_refusal(client_to: MakeClient) -> None:
    """B28: the words were lost with a reset: told as a broken request, tried as often as any (backoff: overridden)."""
    with WireServer(SMALL, [read_bytes(4096), reset]) as server:
        client = client_to(server.url, retry=IMPATIENT)
        client.engines()
        with within(10.0):
            sample = client.generate([WIDE], on_error="return")[0]
        check_failed(sample, TransportError, "/generate", attempts=5)


# --- B26: routed experts ----------------------------------------------------------------------------------------------

SHAPE = (4, 2)  # layers, top-k
ROWS = 4  # two prompt tokens and three new ones, less one
EXPERTS = np.arange(ROWS * 8, dtype=np.int32).reshape(ROWS, *SHAPE)


def npy_base64(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("form", [raw_base64, npy_base64, np.ndarray.tolist], ids=["raw", "npy", "lists"])
def test_experts_in_every_form(client_to: MakeClient, form: Callable[[Any], object]) -> None:
    """B26 b to d: the same array."""
    with ScriptedEngine(lambda request, _: [answer(with_experts(request, form(EXPERTS)))]) as engine:
        client = client_to(engine.url, routed_experts_shape=SHAPE)
        sample = client.generate([[5, 6]], return_routed_experts=True)[0]
        check(sample, [5, 6])
        assert sample.routed_experts is not None
        assert np.array_equal(sample.routed_experts, EXPERTS)


BAD_EXPERTS: dict[str, tuple[object, str]] = {
    "absent": (None, "--enable-return-routed-experts"),
    "bad padding": (raw_base64(EXPERTS)[:-2], "routed_experts: bad base64"),
    "not base64": ("#" * 400, "routed_experts: bad base64"),
    "half an int": (base64.b64encode(EXPERTS.tobytes()[:-1]).decode(), "not a whole number of int32"),
    "a row too few": (raw_base64(EXPERTS[1:]), "24 values are not 4 rows of 8 values"),
    "a broken npy": (npy_base64(EXPERTS)[:40], "routed_experts"),
    "a number": (7, "routed_experts"),
}


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_experts_that_cannot_be_right(client_to: MakeClient, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """B26 a and e: this sample is FAILED and says why; the payload is in no log and in no error."""
    value, words = BAD_EXPERTS[name]
    caplog.set_level("DEBUG")
    with ScriptedEngine(lambda request, _: [answer(with_experts(request, value))]) as engine:
        client = client_to(engine.url, routed_experts_shape=SHAPE)
        sample = client.generate([[5, 6]], return_routed_experts=True, on_error="return")[0]
        check_failed(sample, ProtocolError, words, attempts=2)
        assert str(value)[:60] not in caplog.text + str(sample.error) or len(str(value)) < 60


def test_an_abort_storm_of_large_answers(client_to: MakeClient) -> None:
    """Item 9: 24 aborted calls bring back 2 MiB each at once: never more than two are in memory (budget: 5 MiB)."""
    filler = json.dumps("A" * (2 * MIB)).encode()

    def aborted(request: Request) -> Script:
        body = json.dumps({"output_ids": [1], "meta_info": {"id": body_of(request)["rid"], "filler": 0}}).encode()
        return [answer(body.replace(b'"filler": 0', b'"filler": ' + filler))]

    with LiveEngine(aborted=aborted) as engine:
        client = client_to(engine.url, body_budget_bytes=5 * MIB)
        job = client.start(prompts(24), return_logprob=False)
        engine.journal.await_running(24)
        budget = client._open().transport._budget
        most = reservations(budget)
        assert client.abort_until_idle().idle
        assert {(sample.status, len(sample.output_ids)) for sample in job.result()} == {(Status.ABORTED, 1)}
        assert (len(most), max(most) <= 5 * MIB, budget._reserved) == (24, True, 0)


# --- the original sin -------------------------------------------------------------------------------------------------


def sin(client_to: MakeClient, count: int, rows: int) -> None:
    """Ours: everything is delivered whole, some at the second attempt (on a socket whose FIN crossed the request), and
    no socket is left half-closed.
    """
    batch = [[first, *range(rows - 3)] for first in range(3, count + 3)]  # so many rows with three new tokens
    with ScriptedEngine(Sinner(rows)) as engine:
        client = client_to(engine.url, routed_experts_shape=SHAPE)
        samples = client.generate(batch, return_routed_experts=True)
        check_all(samples, batch, attempts=None)
        shapes = {sample.routed_experts.shape for sample in samples if sample.routed_experts is not None}
        assert shapes == {(rows, *SHAPE)}
        port = engine.server.port
        eventually(lambda: set(client_states(port)) <= {"CLOSE_WAIT"}, "the engine has closed its side")
        eventually(lambda: client_states(port) == [], "and we ours", 4.0)


def test_the_original_sin(client_to: MakeClient) -> None:
    """Item 11: 200 answers with routed experts and a FIN behind each, at once or after idling past the keep-alive."""
    sin(client_to, 200, 500)


@pytest.mark.slow
def test_the_original_sin_in_thousands(client_to: MakeClient) -> None:
    """Item 11: 2000 answers of 128 kB."""
    sin(client_to, 2000, 3000)


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_the_original_sin_of_a_plain_client(count: int) -> None:
    """Item 11: the same answers to a requests.Session, whose sockets stay in CLOSE_WAIT for as long as it lives."""
    with ScriptedEngine(Sinner(500, count)) as engine, requests.Session() as session:
        session.mount("http://", HTTPAdapter(pool_maxsize=count))
        posts = all_at_once([partial(post_plainly, session, f"{engine.url}/generate", n) for n in range(count)])
        assert [post.result(60.0) for post in posts] == list(range(count))
        port = engine.server.port
        eventually(lambda: client_states(port) == ["CLOSE_WAIT"] * count, "every socket has its FIN unread")


def post_plainly(session: requests.Session, url: str, number: int) -> int:
    """Reads the answer to its end, as everybody does; the prompt that it belongs to."""
    whole = session.post(url, json={"rid": str(number), "input_ids": [number]}).json()
    return int(whole["output_ids"][0]) - 1000


def test_large_requests_are_echoed(client_to: MakeClient) -> None:
    """The other way round: a 9 MB prompt that the engine takes whole is answered like any other."""
    with ScriptedEngine(echo) as engine:
        check(client_to(engine.url).generate([WIDE])[0], WIDE.tolist())
