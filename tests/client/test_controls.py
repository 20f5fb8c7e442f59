"""The gate that holds, pausing and resuming, control verbs, keys, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests

from rolloutsync import ControlError, EngineHTTPError, NotIdleError, RolloutClient, Status
from rolloutsync.clock import Clock
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ScriptedEngine, body_of, calls, check_sample, error_answer, generations, params, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]
CLOCK = Clock()


def let_pass(seconds: float) -> None:
    until = CLOCK.monotonic() + seconds
    eventually(lambda: CLOCK.monotonic() > until, f"{seconds} s have passed")


def test_a_pause_holds_generate(fleet: SimFleet, make_client: MakeClient) -> None:
    """B29 a: new samples wait unsent; their time stands still; after resume() each is made exactly once."""
    client = make_client(fleet)
    client.pause("in_place")
    assert all(engine.state()["paused"] for engine in fleet.engines)
    assert all(status.paused for status in client.engines())
    assert client.stats().gate == "hold"
    waiting = in_thread(lambda: client.generate(prompts(8), params(4), timeout=0.4))
    eventually(lambda: client.stats().open == 8, "they wait")
    let_pass(0.6)
    assert calls(fleet, "/generate") == 0
    client.resume()
    samples = waiting.result(5.0)
    for sample, ids in zip(samples, prompts(8), strict=True):
        check_sample(sample, ids, 4)
        assert sample.attempts == 1
    assert len(generations(fleet)) == 8
    assert client.stats().gate == "open"


def test_an_in_place_pause_freezes_what_runs(fleet: SimFleet, make_client: MakeClient) -> None:
    """Running samples go on after resume() as if nothing had been; the pause does not use up their time."""
    client = make_client(fleet)
    running = in_thread(lambda: client.generate(prompts(4), params(600), timeout=1.6))
    eventually(lambda: sum(engine.state()["running"] for engine in fleet.engines) == 4, "they run")
    client.pause("in_place")
    let_pass(1.4)
    client.resume()
    for sample, ids in zip(running.result(5.0), prompts(4), strict=True):
        check_sample(sample, ids, 600)


def test_an_aborting_pause_returns_partials(fleet: SimFleet, make_client: MakeClient) -> None:
    """Mode abort ends what runs; the samples are partials, and nothing new leaves."""
    client = make_client(fleet[0])
    job = client.start(prompts(2), params(30_000))
    eventually(lambda: fleet.engines[0].state()["running"] == 2, "they run")
    client.pause("abort")
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    client.resume()


def test_an_unknown_mode_does_nothing(fleet: SimFleet, make_client: MakeClient) -> None:
    """Refused before anything happens."""
    client = make_client(fleet)
    with pytest.raises(ValueError, match="pause mode must be one of"):
        client.pause("softly")
    assert client.stats().gate == "open"
    assert calls(fleet, "/pause_generation") == 0


def test_a_pause_that_fails_somewhere(make_client: MakeClient) -> None:
    """The error has each answer and each error; nothing leaves until resume(), which opens the gate."""
    with ScriptedEngine() as good, ScriptedEngine(others={"/pause_generation": error_answer("500 Oops")}) as bad:
        client = make_client([good.url, bad.url])
        with pytest.raises(ControlError, match="pause failed at 1 of 2 engines") as caught:
            client.pause("retract")
        assert list(caught.value.answers) == [good.url]
        assert isinstance(caught.value.errors[bad.url], EngineHTTPError)
        assert [status.paused for status in client.engines()] == [True, False]
        assert client.stats().gate == "hold"
        client.resume()
        assert client.stats().gate == "open"
        assert good.counts()["/continue_generation"] == 1


def test_a_dead_engine_does_not_keep_the_others_paused(make_client: MakeClient, fleet: SimFleet) -> None:
    """An engine that died in the pause holds nothing: the others are continued and the gate opens."""
    with SimFleet(engines=1) as lost:
        client = make_client([lost[0], fleet[0]])
        client.pause("in_place")
        lost.engines[0].kill()
        client.resume()
        assert client.stats().gate == "open"
        check_sample(client.generate([[5]], params(4))[0], [5], 4)
        client.pause("in_place")
        client.resume()
        assert client.stats().gate == "open"


def test_flush_and_control(fleet: SimFleet, make_client: MakeClient) -> None:
    """One call to every engine; answers by URL, text where it is not JSON."""
    client = make_client(fleet)
    client.flush_cache()
    assert calls(fleet, "/flush_cache") == 4
    answers = client.control("/slow_down", {"forward_sleep_time": None})
    assert answers == dict.fromkeys(fleet)
    told = client.control("/model_info", method="GET")
    assert all(told[url]["weight_version"] == "default" for url in fleet)
    assert all("Cache flushed" in text for text in client.control("/flush_cache").values())


def test_control_errors(fleet: SimFleet, make_client: MakeClient) -> None:
    """What failed and what did not are both told; arguments are checked first."""
    client = make_client(fleet)
    fleet.engines[2].add_fault(Fault(kind="status", status=400, path="/flush_cache", body={"message": "busy"}))
    with pytest.raises(ControlError, match="busy") as caught:
        client.flush_cache()
    assert set(caught.value.errors) == {fleet[2]}
    assert set(caught.value.answers) == set(fleet) - {fleet[2]}
    with pytest.raises(ValueError, match="path must"):
        client.control("flush_cache")
    with pytest.raises(ValueError, match="method must"):
        client.control("/flush_cache", method="PUT")


def test_what_control_sends(make_client: MakeClient) -> None:
    """A JSON body always with POST, none with GET."""
    with ScriptedEngine() as engine:
        client = make_client(engine.url)
        client.control("/load_lora_adapter", {"lora_name": "a"})
        client.control("/start_profile")
        client.control("/anything", method="GET")
        sent = {request.path: (request.method, request.body) for request in engine.server.requests}
    assert sent["/load_lora_adapter"] == ("POST", b'{"lora_name":"a"}')
    assert sent["/start_profile"] == ("POST", b"{}")
    assert sent["/anything"] == ("GET", b"")


def test_memory_is_released_only_behind_a_proof(fleet: SimFleet, make_client: MakeClient) -> None:
    """A busy engine dies of it: refused without proof, refused again once the gate was open."""
    client = make_client(fleet)
    with pytest.raises(NotIdleError, match="release_memory needs proof of idle"):
        client.release_memory()
    client.abort_until_idle(10.0)
    with pytest.raises(NotIdleError):
        client.release_memory(["kv_cache"])
    assert calls(fleet, "/release_memory_occupation") == 0
    client.abort_until_idle(10.0, keep_closed=True)
    client.release_memory(["kv_cache"])
    client.resume_memory(["kv_cache"])
    client.resume()
    assert calls(fleet, "/release_memory_occupation") == 4
    assert calls(fleet, "/resume_memory_occupation") == 4


def test_loads(fleet: SimFleet, make_client: MakeClient) -> None:
    """Every engine's load, by URL."""
    client = make_client([*fleet[:1], "http://127.0.0.1:1"])
    job = client.start(prompts(3), params(30_000))
    eventually(lambda: client.loads()[fleet[0]].running == 3, "three run")
    assert client.loads()["http://127.0.0.1:1"].kind.name == "UNKNOWN"
    job.abort()


def test_keys(make_client: MakeClient) -> None:
    """The API key for generate, the admin key for control; without them everything is refused."""
    with SimFleet(engines=1, api_key="K", admin_api_key="A", tokens_per_second=1000.0) as fleet:
        client = make_client(fleet, api_key="K", admin_api_key="A")
        check_sample(client.generate([[5]], params(4))[0], [5], 4)
        client.flush_cache()
        assert client.abort_until_idle(10.0).idle
        bare = make_client(fleet)
        failed = bare.generate([[5]], on_error="return")[0]
        assert isinstance(failed.error, EngineHTTPError)
        assert (failed.error.status, failed.attempts) == (401, 1)
        with pytest.raises(ControlError, match="401"):
            make_client(fleet, api_key="K").flush_cache()
        assert "K" not in repr(client)


def test_a_key_beats_the_sessions_auth_header(make_client: MakeClient) -> None:
    """An explicit key is what is sent, whatever headers a session has; keys never reach the log or an error."""
    session = requests.Session()
    session.headers["Authorization"] = "Bearer old"
    with ScriptedEngine(lambda *_: error_answer("400 Bad")) as engine:
        client = make_client(engine.url, api_key="topsecret", session=session)
        failed = client.generate([[5]], on_error="return")[0]
        generate = next(request for request in engine.server.requests if request.path == "/generate")
        assert generate.headers["authorization"] == "Bearer topsecret"
        assert "topsecret" not in str(failed.error) + repr(failed.error) + repr(client)
        assert body_of(generate)["input_ids"] == [5]


@pytest.mark.parametrize("key", ["", " k", "k\n", "ü", 5])
def test_bad_keys(key: object) -> None:
    """Refused by the constructor, which does not repeat the key."""
    with pytest.raises((ValueError, TypeError), match="api_key must be"):
        RolloutClient("http://127.0.0.1:1", api_key=key)  # type: ignore[arg-type]
