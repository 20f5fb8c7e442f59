"""B01: sockets that the engine closes while they are idle, while we send, or in the middle of its answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutsync import EngineState, Status, TransportError
from rolloutsync.errors import Phase
from tests.client.kit import ScriptedEngine, body_of, prompts
from tests.faults.engine import LiveEngine
from tests.faults.kit import IMPATIENT, MakeClient, check, check_all, check_failed, echo, first_then, order_of
from tests.kernel import client_states
from tests.steps import in_turn, once, patient
from tests.wire import Peer, Request, Script, answer, close, eventually, reset, send

HALF_A_HEAD = send(b"HTTP/1.1 200 OK\r\nContent-Le")


def test_a_socket_that_was_closed_while_idle(client_to: MakeClient) -> None:
    """Variant a: the engine's FIN comes 0.3 s after its answer; the next call takes a new socket and nobody notices."""
    with ScriptedEngine(lambda request, _: [*echo(request), patient(0.3)]) as engine:
        client = client_to(engine.url)
        check(client.generate([[5, 6]])[0], [5, 6])
        eventually(lambda: "CLOSE_WAIT" in client_states(engine.server.port), "the FIN has come")
        check(client.generate([[7, 8]])[0], [7, 8])
        generates = [request for request in engine.server.requests if request.path == "/generate"]
        assert generates[0].connection != generates[1].connection
        assert engine.aborted() == []


@pytest.mark.parametrize("end", [[reset], [close]], ids=["reset", "fin"])
def test_a_reused_socket_that_breaks_under_the_request(
    client_to: MakeClient, warnings: Callable[[], list[str]], end: Script
) -> None:
    """Variant b: the engine has read and counted the request. Once more at once, the first copy is aborted before."""
    with ScriptedEngine(lambda request, number: end if number == 1 else echo(request)) as engine:
        client = client_to(engine.url)
        check(client.generate([[5, 6]])[0], [5, 6])
        sample = client.generate([[7, 8]])[0]
        check(sample, [7, 8], attempts=2)
        _, lost, again = engine.rids()
        assert (engine.aborted(), sample.rid) == ([lost], again)
        assert order_of(engine, "/generate", "/abort_request") == ["/generate"] * 2 + ["/abort_request", "/generate"]
        assert [status.state for status in client.engines()] == [EngineState.LIVE]
        assert warnings() == []


@pytest.mark.parametrize("end", [reset, close], ids=["reset", "fin"])
@pytest.mark.parametrize("reused", [True, False], ids=["reused", "fresh"])
def test_a_socket_that_breaks_in_the_answers_head(
    client_to: MakeClient, end: Callable[[Peer], None], reused: bool
) -> None:
    """Variant c: half of the headers, then nothing: no race, whether or not the socket was used before."""
    broken: Script = [HALF_A_HEAD, end]
    with ScriptedEngine(lambda request, number: broken if number == reused else echo(request)) as engine:
        client = client_to(engine.url)
        if reused:
            client.generate([[3]])
        check(client.generate([[7, 8]])[0], [7, 8], attempts=2)
        assert engine.aborted() == [engine.rids()[reused]]


def test_the_others_are_not_affected(client_to: MakeClient) -> None:
    """Sixteen sockets are reused at once and three of them break: each sample is there once, the other 13 at once."""
    breaking: set[int] = set()

    def story(request: Request, _: int) -> Script:
        first = body_of(request)["input_ids"][0]
        if first not in breaking:
            return echo(request)
        breaking.remove(first)
        return [reset]

    with ScriptedEngine(story) as engine:
        client = client_to(engine.url)
        batch = prompts(16)
        check_all(client.generate(batch), batch)
        breaking.update({7, 12, 18})
        samples = client.generate(batch)
        check_all(samples, batch, attempts=None)
        assert [sample.index for sample in samples if sample.attempts == 2] == [4, 9, 15]
        assert len(set(engine.rids())) == len(engine.rids()) == 16 + 16 + 3


def test_attempts_are_bounded(client_to: MakeClient) -> None:
    """Every request is reset: five are sent, each with its own id, each aborted; then the sample says so."""
    with ScriptedEngine(first_then(echo_once(), *[[reset]] * 9)) as engine:
        client = client_to(engine.url, retry=IMPATIENT)
        client.generate([[3]], on_error="return")
        sample = client.generate([[7, 8]], on_error="return")[0]
        check_failed(sample, TransportError, "/generate", Phase.SENT.value, attempts=5)
        sent = engine.rids()[1:]
        assert (len(sent), len(set(sent)), engine.aborted()[-5:]) == (5, 5, sent)


def echo_once() -> Script:
    """An answer for nobody: the first call only opens the sockets."""
    return [answer(b"[]", "400 Bad Request")]


def test_a_race_that_was_a_death(client_to: MakeClient) -> None:
    """The engine dies under a request on a reused socket: nobody listens for a second try there; it goes elsewhere."""
    with ScriptedEngine(echo) as other, LiveEngine(in_turn(echo, lambda *_: None)) as engine:
        client = client_to(engine.url)
        check(client.generate([[5, 6]])[0], [5, 6])
        future = client.submit([7, 8])
        engine.journal.await_running(2)
        client.add_engine(other.url)
        engine.die()
        check(future.result(10.0), [7, 8], attempts=2)
        assert other.rids() == [future.result().rid]
        assert [status.state for status in client.engines()] == [EngineState.DOWN, EngineState.LIVE]


def test_an_abort_survives_the_race(client_to: MakeClient) -> None:
    """On the control lane: the orphan's abort is sent again on a new socket, and its engine stays in use."""
    abort = once(reset, then=answer(b""))
    with ScriptedEngine(first_then([close]), others={"/abort_request": [abort]}) as engine:
        client = client_to(engine.url)
        client.flush_cache()
        sample = client.generate([[5, 6]])[0]
        check(sample, [5, 6], attempts=2)
        first = engine.rids()[0]
        assert engine.aborted() == [first, first]
        assert [found.state for found in client.engines()] == [EngineState.LIVE]


def test_one_answer_for_each_sample(client_to: MakeClient) -> None:
    """Status is the proof: a broken copy is never delivered beside the whole one."""
    with ScriptedEngine(lambda request, number: [reset] if number % 3 == 1 else echo(request)) as engine:
        client = client_to(engine.url)
        samples = [client.generate([[prompt]])[0] for prompt in range(3, 9)]
        assert [sample.output_ids[0] for sample in samples] == [1003, 1004, 1005, 1006, 1007, 1008]
        stats = client.stats()
        assert (stats.admitted, stats.truncated, stats.open) == (6, 6, 0)
        assert {sample.status for sample in samples} == {Status.TRUNCATED}
