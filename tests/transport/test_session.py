"""The session: what of the user's is honoured, what of the environment is ignored, what the sockets are set to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter

from rolloutsync.errors import Cut, Phase
from rolloutsync.transport import Lane
from tests.background import in_thread
from tests.transport.kit import CLOCK, Caller
from tests.wire import Request, WireServer, answer, read_request, serve, silence

MakeCaller = Callable[..., Caller]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
KEY = {"Authorization": "Bearer K"}


def always(reply: bytes = OK) -> list[Callable[..., None]]:
    return [serve(lambda _: reply)]


def test_redirects_are_not_followed(call_to: MakeCaller) -> None:
    """B37: a 301 or 307 is the answer; no POST ever becomes a GET."""
    with WireServer(always(b"HTTP/1.1 301 Moved\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n")) as server:
        assert call_to(server.url).full()[0] == 301
        assert server.paths() == ["/generate"]


def test_cookies_are_not_kept(call_to: MakeCaller) -> None:
    """What one answer sets, no later request carries."""
    with WireServer(always(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Path=/\r\nContent-Length: 0\r\n\r\n")) as server:
        caller = call_to(server.url)
        caller.post()
        caller.post()
        assert all("cookie" not in request.headers for request in server.requests)


@pytest.fixture
def _hostile_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dead proxy for everything, and a netrc with a login for everything."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login bob password pw\n")
    netrc.chmod(0o600)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    monkeypatch.setenv("NETRC", str(netrc))


@pytest.mark.usefixtures("_hostile_environment")
@pytest.mark.parametrize("own_session", [False, True])
def test_proxies_and_netrc_of_the_environment_are_ignored(call_to: MakeCaller, own_session: bool) -> None:
    """B36: the engine is reached directly, with our key, and os.environ is what it was."""
    session = requests.Session() if own_session else None
    before = dict(os.environ)
    with WireServer(always()) as server:
        caller = call_to(server.url, session=session)
        calls = [in_thread(lambda: caller.post(headers=KEY)) for _ in range(8)]
        assert [call.result(5.0) for call in calls] == [b"ok"] * 8
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer K"}
    assert dict(os.environ) == before


def test_a_proxy_of_the_users_session_is_used(call_to: MakeCaller) -> None:
    """Opting in works: the proxy gets the request, and its socket can be cut."""
    with WireServer([read_request, answer(b"by proxy"), read_request, silence]) as proxy:
        session = requests.Session()
        session.proxies["http"] = proxy.url
        caller = call_to("http://127.0.0.1:1", session=session)
        assert caller.post() == b"by proxy"
        assert proxy.requests[0].path == "http://127.0.0.1:1/generate"
        assert caller.fails(seconds=0.3).cut is Cut.DEADLINE


def test_tcp_options(call_to: MakeCaller) -> None:
    """A half-open peer is found after half_open_s, whether we wait or send."""
    with WireServer(always()) as server:
        caller = call_to(server.url, half_open_s=20.0)
        caller.post()
        caller.post(lane=Lane.CONTROL)
        sockets = [connection.sock for connection in caller.transport._registry._connections]
        assert len(sockets) == 2
        for sock in sockets:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_the_users_session_is_honoured_and_not_changed(call_to: MakeCaller) -> None:
    """Headers, auth, parameters, hooks and cookies of a session are used; nothing on it changes."""
    session = requests.Session()
    session.headers["X-Team"] = "rl"
    session.auth = ("ann", "secret")
    session.params = {"tenant": "7"}
    session.cookies.set("sid", "1")
    seen: list[int] = []
    session.hooks["response"].append(lambda response, **_: seen.append(response.status_code))
    before, adapters = vars(session).copy(), dict(session.adapters)
    headers = dict(session.headers)
    with WireServer(always(OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: new=1\r\n\r\n"))) as server:
        caller = call_to(server.url, session=session)
        assert caller.post() == b"ok"
        caller.post()
        got = server.requests[-1]
    assert got.headers["x-team"] == "rl"
    assert got.headers["authorization"].startswith("Basic ")
    assert got.headers["cookie"] == "sid=1"
    assert got.path == "/generate?tenant=7"
    assert seen == [200, 200]
    assert vars(session) == before
    assert (dict(session.headers), dict(session.adapters)) == (headers, adapters)
    assert dict(session.cookies) == {"sid": "1"}


class Recording(HTTPAdapter):
    """An adapter of the user's own."""

    def __init__(self) -> None:
        self.urls: list[str | None] = []
        super().__init__()

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        self.urls.append(request.url)
        return super().send(request, *args, **kwargs)


def test_the_users_adapter_makes_the_calls(call_to: MakeCaller) -> None:
    """A mounted adapter is used, and its errors have phases too."""
    session, adapter = requests.Session(), Recording()
    session.mount("http://", adapter)
    with WireServer(always()) as server:
        caller = call_to(server.url, session=session)
        assert caller.post() == b"ok"
        assert adapter.urls == [f"{server.url}/generate"]
    assert caller.fails().phase is Phase.REFUSED
    adapter.close()


def test_silence_ends_at_the_deadline_under_a_foreign_adapter(call_to: MakeCaller) -> None:
    """Our cuts do not reach its sockets, so its reads have a timeout of their own."""
    session = requests.Session()
    session.mount("http://", Recording())
    with WireServer([read_request, silence]) as server:
        began = CLOCK.monotonic()
        error = call_to(server.url, session=session).fails(seconds=0.4)
        assert (error.cut, CLOCK.monotonic() - began < 1.4) == (Cut.DEADLINE, True)


class Signing(requests.Session):
    """A session of the user's own class."""

    def request(self, method: Any, url: Any, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["headers"] = {**kwargs["headers"], "X-Signature": f"{method} {url}"}
        return super().request(method, url, *args, **kwargs)


def test_a_session_of_another_class_is_used_as_it_is(call_to: MakeCaller) -> None:
    """It makes every request itself; its answers and its silence are handled like ours."""
    with Signing() as session, WireServer([read_request, answer(b"signed"), read_request, silence]) as server:
        adapters = dict(session.adapters)
        caller = call_to(server.url, session=session)
        assert caller.post() == b"signed"
        assert server.requests[0].headers["x-signature"] == f"POST {server.url}/generate"
        assert caller.fails(seconds=0.4).cut is Cut.DEADLINE
        assert dict(session.adapters) == adapters


def test_ipv6(call_to: MakeCaller) -> None:
    """An address in brackets."""
    with WireServer(always(), host="::1") as server:
        assert call_to(server.url).post() == b"ok"


def test_localhost_with_a_server_on_one_family(call_to: MakeCaller) -> None:
    """B37: a name with two addresses, of which one refuses."""
    with WireServer(always()) as server:
        assert call_to(f"http://localhost:{server.port}").post() == b"ok"


def test_what_a_request_looks_like(call_to: MakeCaller) -> None:
    """One request line, our headers, the body as it is."""
    with WireServer(always()) as server:
        call_to(server.url).post(b"[1, 2]", headers={"X-A": "b", "Content-Type": "application/json"})
        request: Request = server.requests[0]
    assert (request.method, request.path, request.body) == ("POST", "/generate", b"[1, 2]")
    assert request.headers["x-a"] == "b"
    assert request.headers["content-type"] == "application/json"
