"""TLS: the same promises over an encrypted socket."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from rolloutsync.errors import Cut, Phase
from tests.background import in_thread
from tests.transport.kit import CLOCK, Caller
from tests.wire import WireServer, answer, head_of, read_request, send, serve, silence, tell, wait_for

MakeCaller = Callable[..., Caller]
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command for a certificate")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of our own with its key, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + key.read_text())
    return certificate


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def session(certificate: Path) -> requests.Session:
    """The user's TLS settings."""
    session = requests.Session()
    session.verify = str(certificate)
    return session


def test_answers_and_reuse(call_to: MakeCaller, tls: ssl.SSLContext, session: requests.Session) -> None:
    """One handshake for two calls, verified against the session's certificate; large bodies both ways."""
    body = b"x" * 500_000
    with WireServer([serve(lambda request: head_of(body) + body if request.body == body else b"")], tls=tls) as server:
        caller = call_to(server.url, session=session)
        assert caller.post(body) == body
        assert caller.post(body) == body
        assert server.accepted == 1


def test_an_unknown_certificate_is_refused(call_to: MakeCaller, tls: ssl.SSLContext) -> None:
    """Nothing is sent to a server whose certificate does not verify."""
    with WireServer([read_request, answer()], tls=tls) as server:
        error = call_to(server.url).fails()
        assert (error.phase, "CERTIFICATE_VERIFY_FAILED" in str(error)) == (Phase.CONNECT, True)
        assert server.requests == []


@pytest.mark.parametrize("body", [False, True])
def test_a_cut_wakes_the_reader_and_never_becomes_an_answer(
    call_to: MakeCaller, tls: ssl.SSLContext, session: requests.Session, body: bool
) -> None:
    """Cut while waiting for the head, and in the middle of a close-delimited body that goes on meanwhile."""
    for _ in range(10):
        waiting = threading.Event()
        part = [send(b"HTTP/1.1 200 OK\r\n\r\npart"), tell(waiting), send(b"x" * 500_000), silence]
        with WireServer([read_request, *(part if body else [tell(waiting), silence])], tls=tls) as server:
            caller = call_to(server.url, session=session)
            call = in_thread(lambda: caller.fails(seconds=30.0))  # noqa: B023 - joined below
            assert waiting.wait(5.0)
            began = CLOCK.monotonic()
            caller.transport.cut(lambda _: True, Cut.DRAIN)
            assert call.result(5.0).cut is Cut.DRAIN
            assert CLOCK.monotonic() - began < 1.0


def test_a_handshake_that_hangs_ends_in_time(call_to: MakeCaller) -> None:
    """A plain server that never answers the handshake: nothing was sent, and connect_s ends it."""
    stop = threading.Event()
    with WireServer([wait_for(stop)]) as server:
        caller = call_to(server.url.replace("http", "https"), connect_s=0.4)
        error = caller.fails(seconds=20.0)
        assert (error.phase, error.cut) == (Phase.CONNECT, None)
        stop.set()
