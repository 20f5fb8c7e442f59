"""The lean path: who may take it, what it sends, and that it reads every answer as the plain path does."""

from __future__ import annotations

import gzip
import inspect
import itertools
import resource
from collections.abc import Callable
from typing import Any

import pytest
import requests
import responses
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool

from rolloutsync.errors import Phase, TransportError
from rolloutsync.transport import Lane
from rolloutsync.transport.lean import LeanPath, _usual_form
from tests.transport.kit import Caller, make_transport
from tests.wire import Request, WireServer, close, read_request, send, serve

MakeCaller = Callable[..., Caller]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
URL = "http://127.0.0.1:9/generate"


def _echo(seen: list[Request]) -> list[Callable[..., None]]:
    def handle(request: Request) -> bytes:
        seen.append(request)
        return OK

    return [serve(handle)]


def _takes_it(caller: Caller) -> bool:
    return caller.transport._lean.route("POST", URL, {}, Lane.DATA) is not None


# --- who may take it --------------------------------------------------------------------------------------------------


class _Subclass(requests.Session):
    pass


def _with(**settings_: Any) -> requests.Session:
    session = requests.Session()
    for name, value in settings_.items():
        setattr(session, name, value)
    return session


@pytest.mark.parametrize(
    ("session", "taken"),
    [
        (None, True),
        (_with(), True),
        (_with(headers={"X-Mine": "1"}), True),
        (_with(auth=("user", "pw")), False),
        (_with(params={"a": "b"}), False),
        (_with(proxies={"http": "http://127.0.0.1:9"}), False),
        (_with(hooks={"response": [lambda answer, **_: answer]}), False),
        (_with(verify=False), False),
        (_Subclass(), False),
    ],
)
def test_who_takes_it(call_to: MakeCaller, transport_path: str, session: Any, taken: bool) -> None:
    """Only where requests would do nothing but what the lean path does."""
    assert _takes_it(call_to("http://127.0.0.1:9", session=session)) is (taken and transport_path != "plain")


def test_an_adapter_of_the_users_is_asked(call_to: MakeCaller) -> None:
    """Also one for a part of the URLs alone."""
    session = requests.Session()
    session.mount("http://127.0.0.1:9/", HTTPAdapter(max_retries=1))
    assert not _takes_it(call_to("http://127.0.0.1:9", session=session))


def test_mocks_catch_every_call(call_to: MakeCaller) -> None:
    """``responses`` patches ``HTTPAdapter.send`` while a test runs; a mock in place of ``get_adapter`` is seen too."""
    caller = call_to("http://127.0.0.1:9")
    with responses.RequestsMock() as mock:
        mock.post(URL, body=b"mocked")
        assert caller.post() == b"mocked"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.Session, "get_adapter", lambda *_: HTTPAdapter())
        assert not _takes_it(caller)


# --- what it sends ----------------------------------------------------------------------------------------------------


def test_both_paths_send_the_same(call_to: MakeCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method, path with query, headers and body, with a session of the user's and without."""
    seen: list[Request] = []
    headers = {"User-Agent": "us", "Accept-Encoding": "identity", "Authorization": "Bearer K"}
    session = _with(headers={"X-Mine": "1"})

    def all_calls() -> None:
        for given_ in (None, session):
            caller = call_to(f"{server.url}/prefix", session=given_)
            caller.full(b'{"a":1}', "/generate?x=1", headers=headers)
            caller.full(None, "/load", headers=headers, lane=Lane.CONTROL)

    with WireServer(_echo(seen)) as server:
        all_calls()
        monkeypatch.setattr(LeanPath, "route", lambda *_: None)
        all_calls()
    sent = [(request.method, request.path, dict(request.headers), request.body) for request in seen]
    assert sent[:4] == sent[4:]
    assert sent[0][1] == "/prefix/generate?x=1"
    assert sent[2][2]["x-mine"] == "1"


def test_no_header_is_sent_twice(call_to: MakeCaller) -> None:
    """Whatever the case in which the session has it: http.client and ours would add their own."""
    seen: list[Request] = []
    session = _with(headers={"host": "example", "content-length": "77", "user-agent": "us"})
    with WireServer(_echo(seen)) as server:
        caller = call_to(server.url, session=session)
        caller.post(b"abc", seconds=5.0)
        route = caller.transport._lean.route("POST", f"{server.url}/generate", {}, Lane.DATA)
    assert (seen[0].headers["host"], seen[0].headers["content-length"]) == ("example", "3")
    head = b"" if route is None else route.head.lower()
    assert (head.count(b"host:"), head.count(b"content-length:")) in {(1, 0), (0, 0)}


def test_a_sessions_headers_are_its_present_ones(call_to: MakeCaller) -> None:
    """The user changes them while the client lives: a token that is renewed."""
    seen: list[Request] = []
    session = _with(headers={"X-Token": "old"})
    with WireServer(_echo(seen)) as server:
        caller = call_to(server.url, session=session)
        caller.post()
        caller.post()
        session.headers["X-Token"] = "new"
        caller.post()
    assert [request.headers["x-token"] for request in seen] == ["old", "old", "new"]


def test_no_header_can_smuggle_another(call_to: MakeCaller) -> None:
    """A line break in a value is refused before anything is sent, as requests does."""
    with WireServer(_echo([])) as server:
        error = call_to(server.url).fails(headers={"Authorization": "Bearer K\r\nX-Evil: 1"})
        assert "Invalid leading whitespace" in str(error) or "header" in str(error).lower()
        assert server.requests == []


def test_an_ipv6_host_and_a_port_are_named(call_to: MakeCaller) -> None:
    """The Host header has brackets and the port."""
    seen: list[Request] = []
    with WireServer(_echo(seen), host="::1") as server:
        call_to(server.url).post()
    assert seen[0].headers["host"] == f"[::1]:{server.port}"


# --- what it reads ----------------------------------------------------------------------------------------------------

_BODY = b'{"text":"\xc3\xa9"}'
_HEADS = [
    b"Content-Length: %d" % len(_BODY),
    b"content-length:%d" % len(_BODY),
    b"CONTENT-LENGTH:   %d  " % len(_BODY),
    b"Content-Length: %d\r\nConnection: keep-alive" % len(_BODY),
    b"Content-Length: %d\r\nConnection: close" % len(_BODY),
    b"Content-Length: %d\r\nConnection: Keep-Alive, TE" % len(_BODY),
    b"X-Content-Length: 3\r\nContent-Length: %d" % len(_BODY),
    b"Content-Length: %d\r\nContent-Length: %d" % (len(_BODY), len(_BODY)),
    b"Content-Length: %d\r\nX-Folded: a\r\n b" % len(_BODY),
    b"Content-Length: %d\r\nContent-Encoding: identity" % len(_BODY),
]
_ENDS_BY_CLOSING = [
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 12x\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc",
    b"",
]
_ANSWERS = [b"HTTP/1.1 200 OK\r\nServer: a\r\n" + head + b"\r\n\r\n" + _BODY for head in _HEADS]
_ZIPPED = gzip.compress(_BODY, mtime=0)
_ANSWERS += [
    b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY,
    b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: z\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(_ZIPPED) + _ZIPPED,
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\nok",
    b"ICY 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
]


def _outcome(server: WireServer, *, plain: bool, calls: int = 1) -> Any:
    """Status and body of each call, or how one of them broke."""
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(LeanPath, "route", lambda *_: None)
        caller = Caller(make_transport(), server.url)
        try:
            return [caller.full(seconds=5.0) for _ in range(calls)]
        except TransportError as error:
            return error.phase, error.cut
        finally:
            assert caller.transport.close(5.0) == []


_NAME: Any = lambda reply: reply[:60].decode("latin-1").replace("\r\n", " | ")  # noqa: E731


@pytest.mark.parametrize("reply", _ENDS_BY_CLOSING, ids=_NAME)
def test_every_answer_that_ends_by_closing_reads_alike(reply: bytes) -> None:
    """What has no length of its own, or none that is one."""
    outcomes = []
    for plain in (False, True):
        with WireServer([read_request, send(reply), close]) as server:
            outcomes.append(_outcome(server, plain=plain))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("reply", _ANSWERS, ids=_NAME)
def test_every_answer_reads_alike(reply: bytes) -> None:
    """Status, body, phase and what becomes of the socket."""
    again = [read_request, send(OK), close]
    outcomes = []
    for plain in (False, True):
        with WireServer([read_request, send(reply), *again], again) as server:
            outcomes.append((_outcome(server, plain=plain, calls=2), server.accepted))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reply=st.sampled_from([*_ANSWERS, *_ENDS_BY_CLOSING]), data=st.data())
def test_every_answer_in_two_pieces_reads_alike(reply: bytes, data: st.DataObject) -> None:
    """Wherever the network cuts it, or the server ends it."""
    at = data.draw(st.integers(0, len(reply)))
    whole = data.draw(st.booleans())
    steps = [read_request, send(reply[:at]), *([send(reply[at:])] if whole else []), close]
    outcomes = []
    for plain in (False, True):
        with WireServer(steps) as server:
            outcomes.append(_outcome(server, plain=plain))
    assert outcomes[0] == outcomes[1]


@given(st.sampled_from(_ANSWERS), st.binary(max_size=3), st.integers(0, 80))
def test_no_strange_head_is_taken_for_a_usual_one(reply: bytes, dirt: bytes, at: int) -> None:
    """A head that the lean path reads itself has exactly one length, which http.client reads too."""
    dirty = reply[:at] + dirt + reply[at:]
    end = dirty.find(b"\r\n\r\n") + 4
    form = _usual_form(dirty, end if end >= 4 else 0)
    if form is not None:
        lines = dirty[: end - 4].lower().split(b"\r\n")
        lengths = [line.partition(b":")[2].strip() for line in lines[1:] if line.startswith(b"content-length:")]
        assert lengths == [b"%d" % form[1]] or (len(lengths) == 1 and int(lengths[0]) == form[1])
        assert dirty.startswith(b"HTTP/1.1 %d" % form[0]) or dirty[:9].upper() == b"HTTP/1.1 "


@pytest.mark.parametrize("size", [3, 300_000])
@pytest.mark.parametrize("lane", list(Lane))
def test_what_is_left_in_a_socket_is_nobodys_answer(call_to: MakeCaller, size: int, lane: Lane) -> None:
    """A front that answers twice: the second is never taken for the answer to the next request."""
    numbers = itertools.count()

    def twice(_: Request) -> bytes:
        body = b"%d" % next(numbers) + b" " * size
        stray = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nSTRAY"
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body + stray

    with WireServer(*([[serve(twice)]] * 4)) as server:
        caller = call_to(server.url)
        answers = [caller.full(lane=lane)[1].strip() for _ in range(4)]
    assert answers == [b"0", b"1", b"2", b"3"]


def test_a_length_that_lies_costs_no_memory(call_to: MakeCaller) -> None:
    """Two gigabytes promised, two bytes sent: memory is touched only as the body comes."""
    with WireServer([read_request, send(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000000\r\n\r\nab"), close]) as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert call_to(server.url).fails(lane=Lane.CONTROL).phase is Phase.BODY
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


# --- pinned -----------------------------------------------------------------------------------------------------------


def test_the_private_names_of_urllib3_still_exist() -> None:
    """Pinned: pools lend with ``_get_conn()``, take back with ``_put_conn(conn)`` and keep in a ``QueueCls``.

    If this fails, change ``_Lending`` in transport/pools.py to the new names.
    """
    assert list(inspect.signature(HTTPConnectionPool._get_conn).parameters)[:1] == ["self"]
    assert len(inspect.signature(HTTPConnectionPool._put_conn).parameters) == 2
    transport = make_transport()
    try:
        route = transport._lean.route("POST", URL, {}, Lane.DATA)
        pool = route.pool if route is not None else transport._adapter.poolmanager.connection_from_url(URL)
        assert isinstance(pool, urllib3.HTTPConnectionPool)
        assert type(pool.pool) is pool.QueueCls is not HTTPConnectionPool.QueueCls
    finally:
        transport.close(1.0)
