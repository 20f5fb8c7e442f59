"""B36, B37: proxies, netrc, keys; URLs in every form, and redirects."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from rolloutsync import EngineHTTPError, RolloutClient
from tests.client.kit import ScriptedEngine, error_answer, prompts
from tests.faults.kit import MakeClient, check_all, check_failed, echo
from tests.wire import Request, Script, WireServer, answer, play


@pytest.fixture
def _hostile_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dead proxy for everything but a network in CIDR form, and a netrc with a login for everybody."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login bob password pw\n")
    netrc.chmod(0o600)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    monkeypatch.setenv("NETRC", str(netrc))


@pytest.mark.usefixtures("_hostile_environment")
def test_the_environment_is_not_asked(client_to: MakeClient) -> None:
    """B36: the engine is reached directly by every verb, with our key, and os.environ is what it was."""
    before = dict(os.environ)
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url, api_key="K")
        check_all(client.generate(prompts(16)), prompts(16))
        assert client.abort_until_idle().idle
        client.flush_cache()
        assert {request.headers["authorization"] for request in engine.server.requests} == {"Bearer K"}
    assert dict(os.environ) == before


@pytest.mark.usefixtures("_hostile_environment")
def test_without_a_key_nobody_logs_in(client_to: MakeClient) -> None:
    """B36: the netrc's login is sent to nobody."""
    with ScriptedEngine(echo) as engine:
        check_all(client_to(engine.url).generate(prompts(2)), prompts(2))
        assert all("authorization" not in request.headers for request in engine.server.requests)


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("http://127.0.0.1:{}/", "/generate"),
        ("http://127.0.0.1:{}//", "/generate"),
        ("http://127.0.0.1:{}/prefix/", "/prefix/generate"),
        ("http://127.0.0.1:{}/a/b", "/a/b/generate"),
        ("HTTP://LOCALHOST:{}", "/generate"),
    ],
)
def test_every_form_of_a_url(client_to: MakeClient, form: str, path: str) -> None:
    """B37: no "//", a prefix is kept, a name with two addresses of which one refuses is no matter."""
    with WireServer([play(echo_anywhere)]) as server:
        check_all(client_to(form.format(server.port)).generate(prompts(2)), prompts(2))
        assert [found for found in server.paths() if found.endswith("/generate")] == [path] * 2
        assert not any("//" in found for found in server.paths())


def echo_anywhere(request: Request, _: int = 0) -> Script:
    return echo(request) if request.path.endswith("/generate") else [answer()]


def test_ipv6(client_to: MakeClient) -> None:
    """B37: an address in brackets."""
    with WireServer([play(echo_anywhere)], host="::1") as server:
        check_all(client_to(server.url).generate(prompts(2)), prompts(2))


def test_the_same_engine_in_four_forms(client_to: MakeClient) -> None:
    """B37: duplicates are one engine."""
    with ScriptedEngine(echo) as engine:
        forms = [engine.url, engine.url + "/", engine.url.replace("http", "HTTP"), engine.url]
        client = client_to(forms)
        assert [status.url for status in client.engines()] == [engine.url]


BAD = [
    "127.0.0.1:30000",
    "http://::1:30000",
    "http://",
    "ftp://a:1",
    "http://a:99999",
    "http://h:1?x",
    "http://u:p@h:1",
]


@pytest.mark.parametrize("url", [*BAD, ""])
def test_bad_urls(url: str) -> None:
    """B37: refused by the constructor, which names it."""
    with pytest.raises(ValueError, match=f"engine URL {re.escape(repr(url))}"):
        RolloutClient(url)


def test_no_url_at_all() -> None:
    """An empty list is no fleet."""
    with pytest.raises(ValueError, match="urls is empty"):
        RolloutClient([])


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"])
def test_redirects_are_refused(client_to: MakeClient, status: str) -> None:
    """B37: the sample fails and says where it was sent; no POST ever becomes a GET, here or elsewhere."""
    redirect = error_answer(status, b"", "Location: /generate/")
    with ScriptedEngine(lambda *_: redirect, others={"/flush_cache": redirect}) as engine:
        client = client_to(engine.url)
        sample = client.generate([[5]], on_error="return")[0]
        check_failed(sample, EngineHTTPError, f"{status[:3]} (to '/generate/'; redirects are not followed)", attempts=1)
        assert engine.counts()["/generate"] == 1
        with pytest.raises(Exception, match="redirects are not followed"):
            client.flush_cache()
        assert engine.counts()["/generate/"] == 0
        posts = [request.method for request in engine.server.requests if "generate" in request.path]
        assert posts == ["POST"]


ODD_INFO: dict[str, Script] = {
    "a list": [answer(b"[]")],
    "null": [answer(b"null")],
    "a page": [answer(b"<html>")],
    "nothing": [answer(b"")],
    "an error": error_answer("500 Oops"),
    "missing": error_answer("404 Not Found"),
    "forbidden": error_answer("401 Unauthorized"),
    "no limit": [answer(b'{"max_running_requests": null, "dp_size": null, "version": null}')],
    "words": [answer(b'{"max_running_requests": "many", "dp_size": "two", "version": 5, "model_path": 7}')],
    "zero": [answer(b'{"max_running_requests": 0, "dp_size": 0, "internal_states": [{}]}')],
    "negative": [answer(b'{"max_running_requests": -4, "dp_size": -1, "internal_states": 3}')],
    "a lot": [answer(b'{"max_running_requests": 1000000000000}')],
    "no path here": [answer(b'{"model_path": "/nowhere\\u0000/x", "version": "0.5.\\u00b2"}')],
}


def test_engines_that_say_odd_things_of_themselves(client_to: MakeClient) -> None:
    """What an engine is may stay unknown; it works all the same, beside the others."""
    paths = ("/server_info", "/get_server_info", "/model_info")
    with contextlib.ExitStack() as stack:
        odd = [ScriptedEngine(echo, others=dict.fromkeys(paths, steps)) for steps in ODD_INFO.values()]
        urls = [stack.enter_context(engine).url for engine in odd]
        client = client_to(urls, engine_concurrency=None)
        batch = prompts(len(urls) * 3)
        check_all(client.generate(batch), batch)
        assert [(status.url, status.state.value) for status in client.engines()] == [(url, "live") for url in urls]
        assert all(1 <= status.limit <= 512 for status in client.engines())
