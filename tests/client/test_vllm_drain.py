"""abort_until_idle on vLLM: what its zero is worth, who answers an abort, and what a hanging core looks like."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rolloutsync import EngineState, IdleState, NotIdleError, Status
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.fleet import SimEngine
from tests.client.kit import ENDLESS, SHORT, ScriptedEngine, check_sample, params, prompts
from tests.client.vllmkit import TOKENS, MakeClient, alone, await_tokens, called, endless
from tests.wire import Request, Script, answer, eventually, silence

pytestmark = pytest.mark.usefixtures("soon_settled")

STRONG = "its load is zero; its front end holds nothing; its core answers"
WEAK = "its load is zero for 0.2 s; nobody can ask its front end; its core answers"


def test_what_runs_comes_back(vllm: SimEngine, make_client: MakeClient) -> None:
    """With its tokens; nothing runs there any more, by more than the engine's gauges."""
    client = make_client(vllm.url)
    job = endless(client, vllm)
    report = client.abort_until_idle(10.0)
    (drain,) = report.engines
    assert (drain.state, drain.rids, drain.detail) == (IdleState.IDLE, (), "")
    assert drain.basis == (STRONG if vllm.config.release >= (0, 26, 0) else WEAK)
    assert drain.basis[:40] in str(report)
    for sample in job.result():
        assert sample.status is Status.ABORTED
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.output_ids) > 0
    assert vllm.state()["running"] == 0
    check_sample(client.generate([[5]], params(4))[0], [5], 4)


def test_everybodys_requests_end(newest: SimEngine, make_client: MakeClient) -> None:
    """Those of others too, also what waits or has shown in no gauge yet."""
    mine, other = make_client(newest.url), make_client(newest.url)
    theirs = other.start([*prompts(70), list(range(3, 20_000))], params(10_000))
    eventually(lambda: newest.state()["live"] == 71, "they are there")
    assert mine.abort_until_idle(10.0).engines[0].state is IdleState.IDLE
    other.abort_until_idle(10.0)
    assert {sample.status for sample in theirs.result()} == {Status.ABORTED}
    assert newest.state()["running"] == 0


def test_own_requests_alone(vllm: SimEngine, make_client: MakeClient) -> None:
    """By their ids in the engine's own form, of either route; the others run on."""
    mine, other = make_client(vllm.url), make_client(vllm.url)
    theirs = other.start(prompts(2), params(400))
    ours = mine.start([*prompts(2), "a text"], ENDLESS)
    await_tokens(vllm, 5)
    report = mine.abort_until_idle(10.0, scope="own")
    assert (report.scope, report.idle) == ("own", True)
    assert {sample.status for sample in ours.result()} == {Status.ABORTED}
    for sample, ids in zip(theirs.result(), prompts(2), strict=True):
        check_sample(sample, ids, 400)
    if vllm.config.release < (0, 26, 0):
        assert vllm.state()["aborts"]["count"] == 0  # they ended with their connections
    else:
        assert all(len(sample.output_ids) for sample in ours.result())


@pytest.mark.slow
def test_own_requests_where_only_scale_out_aborts(make_client: MakeClient) -> None:
    """Without the development mode an engine still aborts by id, and nobody else's requests end."""
    with alone(dev_mode=False) as engine:
        client = make_client(engine.url)
        job = endless(client, engine)
        report = client.abort_until_idle(10.0)
        assert report.idle
        assert all(len(sample.output_ids) for sample in job.result())
        assert called(engine)["/inference/v1/abort_requests"] == 4
        assert called(engine)["/abort_requests"] == 1


def test_a_core_that_hangs(newest: SimEngine, make_client: MakeClient) -> None:
    """Its front end gives everybody their tokens back and says that it holds nothing. That is no proof."""
    client = make_client(newest.url)
    job = endless(client, newest)
    newest.add_fault(Fault(kind="freeze"))
    with pytest.raises(NotIdleError, match=r"Frozen.*its core does not answer") as caught:
        client.abort_until_idle(0.5)
    assert caught.value.report.engines[0].state is IdleState.FROZEN
    assert all(sample.status is Status.ABORTED and len(sample.output_ids) for sample in job.result())
    newest.clear_faults()
    assert client.abort_until_idle(10.0).idle


def test_a_core_that_hangs_with_somebody_elses_request(newest: SimEngine, make_client: MakeClient) -> None:
    """It shows in no gauge as long as the core does not end a step, and is gone from the front end when aborted."""
    mine, other = make_client(newest.url), make_client(newest.url)
    for client in (mine, other):
        client.engines()
    newest.add_fault(Fault(kind="freeze"))
    theirs = other.start(prompts(1), ENDLESS)
    eventually(lambda: called(newest).get(TOKENS) == 1, "it has come")
    report = mine.abort_until_idle(0.4, raise_on_timeout=False)
    assert report.engines[0].state is IdleState.FROZEN
    newest.clear_faults()
    assert mine.abort_until_idle(10.0).idle
    other.abort_until_idle(10.0)
    assert theirs.result()[0].status is Status.ABORTED


class Gauges(ScriptedEngine):
    """A vLLM engine whose gauges and front end say what a story says, reading by reading; the last one for ever.

    Args:
        running: By ``/metrics``.
        held: By ``/abort_requests``.
        counted: By ``/load``.
    """

    def __init__(
        self, *, running: Sequence[int] = (0,), held: Sequence[int] = (0,), counted: Sequence[int] = (0,)
    ) -> None:
        self._said = {"/metrics": list(running), "/abort_requests": list(held), "/load": list(counted)}
        super().__init__()

    silent = False
    info: Mapping[str, Any] = {}  # by ``/server_info``

    def _choose(self, request: Request) -> Script:
        if self.silent:
            return [silence]
        story = self._said.get(request.path)
        if story is None:
            told = self.info if request.path.startswith("/server_info") else {"version": "0.33.0"}
            return [answer(json.dumps(told).encode())]
        number = story.pop(0) if len(story) > 1 else story[0]
        return [answer(self._words(request.path, number))]

    def _words(self, path: str, number: int) -> bytes:
        if path == "/load":
            return json.dumps({"server_load": number}).encode()
        if path == "/abort_requests":
            return json.dumps({"status": "aborted", "aborted": number}).encode()
        return b"".join(
            b'vllm:num_requests_%b{engine="0"} %d.0\n' % row for row in ((b"running", number), (b"waiting", 0))
        )

    def order(self) -> list[str]:
        """What was asked of the drain, in order."""
        names = {"/metrics": "metrics", "/abort_requests": "held", "/is_sleeping": "core"}
        return [names[path] for path in self.server.paths() if path in names]


def test_the_order_of_a_proof(make_client: MakeClient) -> None:
    """The gauges are read after the core has answered, and that after the abort; twice."""
    with Gauges() as engine:
        report = make_client(engine.url).abort_until_idle(10.0)
        assert (report.engines[0].basis, report.engines[0].sweeps) == (STRONG, 2)
        assert engine.order() == ["held", "core", "metrics"] * 2


@pytest.mark.parametrize(
    "story",
    [
        {"held": (3, 0)},
        {"held": (0, 3, 0)},
        {"running": (2, 0)},
        {"running": (0, 2, 0)},
        {"counted": (0, 1, 0)},
    ],
    ids=str,
)
def test_late_requests_are_swept_again(story: dict[str, Sequence[int]], make_client: MakeClient) -> None:
    """Whoever shows them, the two zeros begin anew after that."""
    with Gauges(**story) as engine:
        report = make_client(engine.url).abort_until_idle(10.0)
        assert report.idle
        assert engine.order()[-6:] == ["held", "core", "metrics"] * 2
        assert report.engines[0].sweeps >= 3


@pytest.mark.parametrize("words", [b"", b"vllm:num_requests_running 0.0\n", b'{"running": 0}', b"nonsense"])
def test_gauges_that_cannot_be_read(words: bytes, make_client: MakeClient) -> None:
    """Never idle."""
    with Gauges() as engine:
        engine._words = lambda path, number: words if path == "/metrics" else b"{}"  # type: ignore[method-assign]
        report = make_client(engine.url).abort_until_idle(0.3, raise_on_timeout=False)
        assert report.engines[0].state is IdleState.UNKNOWN


def test_a_frozen_core_loses_its_samples(newest: SimEngine, fleet: SimFleet, make_client: MakeClient) -> None:
    """Its health is well and its gauges are read; only its core does not answer, and that is what counts."""
    client = make_client([newest.url, fleet[0]], timeouts=replace(SHORT, dead_s=0.6))
    job = client.start(prompts(4), params(400))
    await_tokens(newest, 1)
    newest.add_fault(Fault(kind="freeze"))
    for sample, ids in zip(job.result(), prompts(4), strict=True):
        check_sample(sample, ids, 400)
    assert client.engines()[0].state is EngineState.QUARANTINED
    assert "its load says nothing of its core" in client.engines()[0].reason
    newest.clear_faults()


@pytest.mark.slow
def test_a_core_that_dies(fleet: SimFleet, make_client: MakeClient) -> None:
    """Its requests go on elsewhere, whatever it had time to say; it is down, and the drain calls it gone."""
    with alone(death_delay_s=0.2) as engine:
        client = make_client([engine.url, fleet[0]])
        job = client.start(prompts(8), params(300))
        await_tokens(engine, 1)
        engine.add_fault(Fault(kind="crash"))
        with contextlib.suppress(RuntimeError, OSError):
            engine.call("POST", TOKENS, {"token_ids": [9], "sampling_params": {}})
        eventually(lambda: not engine.alive, "it is dead")
        for sample, ids in zip(job.result(), prompts(8), strict=True):
            check_sample(sample, ids, 300)
        assert client.engines()[0].state in {EngineState.DOWN, EngineState.QUARANTINED}
        report = client.abort_until_idle(10.0)
        assert [drain.state for drain in report.engines] == [IdleState.GONE, IdleState.IDLE]


def test_several_front_ends(make_client: MakeClient) -> None:
    """Each knows its own requests alone, and the kernel chooses who gets a connection: so there are many new ones."""
    with Gauges() as engine:
        engine.info = {"vllm_config": {"parallel_config": {"_api_process_count": 2}}}
        report = make_client(engine.url).abort_until_idle(10.0)
        assert report.engines[0].basis.startswith(
            "its load is zero for 0.2 s; those of its 2 front ends that were met hold"
        )
        assert engine.order()[:8] == ["held"] * 6 + ["core", "metrics"]
        assert engine.server.accepted >= 6 * report.engines[0].sweeps


def test_a_silent_front_end(make_client: MakeClient) -> None:
    """Nothing is known, and the drain ends at its deadline."""
    with Gauges() as engine:
        client = make_client(engine.url)
        client.engines()
        engine.silent = True
        report = client.abort_until_idle(0.5, raise_on_timeout=False)
        assert report.engines[0].state is IdleState.UNKNOWN
        assert report.seconds < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"kind": "status", "status": 500}, {"kind": "reset"}])
def test_a_resume_that_fails_is_owed(make_client: MakeClient, fault: dict[str, Any]) -> None:
    """Before 0.26 an abort of all is a pause and its end: an engine that stayed paused would never answer again."""
    with alone("0.22.0") as engine:
        client = make_client(engine.url)
        job = endless(client, engine, 2)
        engine.add_fault(Fault(path="/resume", **fault))
        assert client.abort_until_idle(10.0).idle
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        assert engine.call("GET", "/is_paused") == {"is_paused": False}
        check_sample(client.generate([[5]], params(4), timeout=5.0)[0], [5], 4)


@pytest.mark.slow
def test_an_abort_ends_nobodys_pause(make_client: MakeClient) -> None:
    """Another client holds the engine for an update; ours ends what runs and leaves the pause."""
    with alone("0.22.0") as engine:
        theirs, ours = make_client(engine.url), make_client(engine.url)
        job = endless(theirs, engine, 2)
        with theirs.quiesced("hold"):
            ours.abort_until_idle(3.0, raise_on_timeout=False)
            assert engine.call("GET", "/is_paused") == {"is_paused": True}
        job.abort()


@pytest.mark.slow
def test_a_frozen_core_that_nobody_can_ask(make_client: MakeClient) -> None:
    """Without the development mode, and with a stranger's request in no gauge: a token of our own must come through."""
    with alone(dev_mode=False) as engine:
        ours, other = make_client(engine.url), make_client(engine.url)
        assert ours.abort_until_idle(10.0).idle
        assert other.abort_until_idle(10.0).idle
        engine.add_fault(Fault(kind="freeze"))
        job = other.start([[5]], ENDLESS)
        eventually(lambda: engine.state()["live"] == 1, "it has come")
        report = ours.abort_until_idle(1.5, raise_on_timeout=False)
        assert not report.idle
        engine.clear_faults()
        job.abort()
