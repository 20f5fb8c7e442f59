"""What the client takes for granted about SGLang, asked of the real one and of the simulated one in the same words."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import Any
from uuid import uuid4

import pytest
import requests

from .launch import RealEngine
from .raw import WAIT_S, RawEngine, raw_engines

SLOW_S = 0.02
CRAWL_S = 0.5
CHUNK = 256
RUNNING_LIMIT = 4
LAYERS = 2
TOP_K = 2
EXPERTS = 8
LATER_SNAPSHOTS = 2


@pytest.fixture(
    params=[
        pytest.param("sim", marks=pytest.mark.slow),
        pytest.param("real", marks=pytest.mark.real),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def engine_kind(request: pytest.FixtureRequest) -> str:
    """As everywhere here, but the simulated half is left to the slow suite: it takes as long as the real one waits."""
    return str(request.param)


@pytest.fixture
def engine(llama_urls: Sequence[str]) -> Iterator[RawEngine]:
    """The first of the dense engines."""
    with raw_engines(llama_urls) as engines:
        yield engines[0]


@pytest.fixture
def moe(moe_urls: Sequence[str]) -> Iterator[RawEngine]:
    """The engine with experts."""
    with raw_engines(moe_urls) as engines:
        yield engines[0]


def long_prompt(first: int) -> list[int]:
    """Six chunks of prefill; prompts with different first tokens share no cache."""
    return [first + n % 400 for n in range(6 * CHUNK)]


def answered(call: Any) -> dict[str, Any]:
    """The body of a generation that was answered with 200."""
    answer: requests.Response = call.result(WAIT_S)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def finish(body: dict[str, Any]) -> dict[str, Any]:
    """How the engine says that the generation ended."""
    reason: dict[str, Any] = body["meta_info"]["finish_reason"]
    return reason


def refused(answer: requests.Response) -> str:
    """The words of a 400, from either of SGLang's two shapes of an error."""
    assert answer.status_code == 400, f"{answer.status_code}: {answer.text}"
    error = answer.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


# Generation.


def test_a_finished_answer_names_its_request_and_counts_its_tokens(engine: RawEngine) -> None:
    """The rid comes back, and ids, logprobs and counts agree."""
    rid = uuid4().hex
    body = engine.generate(rid=rid, tokens=5)
    meta = body["meta_info"]
    assert meta["id"] == rid
    assert finish(body) == {"type": "length", "length": 5}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == body["output_ids"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], len(body["output_ids"])) == (3, 5, 5)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 5}]


def test_a_text_prompt_gives_its_token_ids_back(engine: RawEngine) -> None:
    """`return_prompt_token_ids` makes a text prompt resumable."""
    request = {"text": "the rest", "sampling_params": {"max_new_tokens": 2}, "return_prompt_token_ids": True}
    answer = engine.post("/generate", request)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    assert len(ids) == answer.json()["meta_info"]["prompt_tokens"] > 0
    assert all(isinstance(each, int) for each in ids)


def test_an_unknown_field_is_ignored_at_the_top_and_refused_among_the_sampling_parameters(engine: RawEngine) -> None:
    """A typing error in a sampling parameter is a 400 that names it; a strange request field does no harm."""
    assert finish(engine.generate(no_such_field=1))["type"] == "length"
    answer = engine.post("/generate", {"input_ids": [5], "sampling_params": {"no_such_parameter": 1}})
    assert "no_such_parameter" in refused(answer)


def test_a_prompt_longer_than_the_context_is_refused(engine: RawEngine) -> None:
    """Too long is a 400, not a truncated prompt."""
    assert "2048" in refused(engine.begin(ids=[5] * 2100, tokens=1).result(WAIT_S))


def test_an_empty_prompt_is_refused(engine: RawEngine) -> None:
    """No token is a 400."""
    assert "input_ids" in refused(engine.begin(ids=[], tokens=1).result(WAIT_S))


def test_a_rid_that_is_still_running_is_refused_and_may_be_used_again_later(engine: RawEngine) -> None:
    """The second use of a live rid is a 400 and leaves the first one alone."""
    engine.slow_down(SLOW_S)
    rid = uuid4().hex
    first = engine.begin(rid)
    engine.await_counts(running=1)
    assert rid in refused(engine.begin(rid).result(WAIT_S))
    engine.abort(rid)
    assert finish(answered(first))["type"] == "abort"
    engine.slow_down(0)
    assert finish(engine.generate(rid=rid))["type"] == "length"


# Abort.


def test_an_aborted_running_request_answers_with_what_it_has(engine: RawEngine) -> None:
    """200, the tokens so far, one logprob for each, and the usual counts."""
    engine.slow_down(SLOW_S)
    rid = uuid4().hex
    call = engine.begin(rid)
    engine.await_load(lambda load: bool(load["num_total_tokens"] > 10), "ten tokens")
    engine.abort(rid)
    body = answered(call)
    meta = body["meta_info"]
    assert finish(body) == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 5 < len(body["output_ids"]) < 1500
    assert [entry[1] for entry in meta["output_token_logprobs"]] == body["output_ids"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == (rid, 3, len(body["output_ids"]))


def test_an_aborted_waiting_request_answers_empty_and_without_counts(engine: RawEngine) -> None:
    """200 with no tokens, another message, and no prompt_tokens: a client must not count on them."""
    engine.slow_down(SLOW_S)
    running = [engine.begin() for _ in range(RUNNING_LIMIT)]
    engine.await_counts(running=RUNNING_LIMIT)
    rid = uuid4().hex
    waiting = engine.begin(rid)
    engine.await_counts(running=RUNNING_LIMIT, waiting=1)
    engine.abort(rid)
    body = answered(waiting)
    assert finish(body) == {"type": "abort", "message": "Abort in waiting queue"}
    assert body["output_ids"] == []
    assert body["meta_info"]["output_token_logprobs"] == []
    assert not {"prompt_tokens", "cached_tokens"} & body["meta_info"].keys()
    engine.await_counts(running=RUNNING_LIMIT)
    engine.abort_all()
    assert {finish(answered(call))["message"] for call in running} == {"Aborted"}


def test_a_request_aborted_in_its_prefill_answers_like_a_waiting_one(engine: RawEngine) -> None:
    """Before the first token there is nothing to give back."""
    engine.slow_down(CRAWL_S)
    rid = uuid4().hex
    call = engine.begin(rid, ids=long_prompt(10), tokens=1)
    engine.await_load(lambda load: bool(load["num_used_tokens"]), "tokens of the prefill")
    engine.abort(rid)
    body = answered(call)
    assert finish(body)["type"] == "abort"
    assert body["output_ids"] == []


def test_an_abort_outlives_a_retract(engine: RawEngine) -> None:
    """Both come during one pass of a prefill, which the pause gives up: the request ends, at the latest on resume."""
    engine.slow_down(CRAWL_S)
    rid = uuid4().hex
    call = engine.begin(rid, ids=long_prompt(30), tokens=500)
    engine.await_load(lambda load: bool(load["num_used_tokens"]), "tokens of the prefill")
    engine.abort(rid)
    engine.pause("retract")
    engine.resume()
    body = answered(call)
    assert finish(body)["type"] == "abort"
    assert len(body["output_ids"]) <= 1


def test_the_first_abort_that_finds_a_request_ends_it_whatever_its_phase(engine: RawEngine) -> None:
    """Also in the only pass of its prefill: it ends as that pass does. Later aborts of its id do nothing."""
    engine.slow_down(CRAWL_S)
    for number in range(3):
        rid = uuid4().hex
        call = engine.begin(rid, ids=long_prompt(20 + number)[: CHUNK // 2], tokens=500)
        while not call.done():
            engine.abort(rid)
            wait([call], timeout=0.05)
        body = answered(call)
        assert finish(body)["type"] == "abort"
        assert len(body["output_ids"]) <= 2


def test_an_abort_reaches_every_rid_that_begins_with_a_live_one(engine: RawEngine) -> None:
    """Aborting `x1` also ends `x12`, hence rids of one length; a prefix that is no live rid itself ends nothing."""
    engine.slow_down(SLOW_S)
    stem = uuid4().hex
    calls = [engine.begin(f"{stem}-{suffix}") for suffix in ("1", "12", "2")]
    load = engine.await_counts(running=3)
    engine.abort(f"{stem}-")
    for _ in range(LATER_SNAPSHOTS):
        load = engine.await_later(load)
    assert load["num_running_reqs"] == 3
    engine.abort(f"{stem}-1")
    assert [finish(answered(call))["type"] for call in calls[:2]] == ["abort", "abort"]
    engine.await_counts(running=1)
    engine.abort(f"{stem}-2")
    assert finish(answered(calls[2]))["type"] == "abort"


def test_an_abort_of_an_unknown_rid_is_accepted(engine: RawEngine) -> None:
    """The answer to an abort says nothing about whether anything was aborted."""
    answer = engine.post("/abort_request", {"rid": uuid4().hex, "abort_all": False})
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_dropped_connection_aborts_its_request(engine: RawEngine) -> None:
    """The engine notices within seconds that nobody waits any more."""
    engine.slow_down(SLOW_S)
    with engine.unanswered(uuid4().hex, tokens=1500):
        engine.await_counts(running=1)
    engine.await_counts(running=0)


# Load.


def test_an_idle_engine_keeps_publishing_and_a_paused_one_stands_still(engine: RawEngine) -> None:
    """The rank's own timestamp moves within two seconds while idle, and not at all under an in-place pause."""
    started = time.monotonic()
    load = engine.await_later(engine.load())
    load = engine.await_later(load)
    assert time.monotonic() - started < 4.0
    engine.pause("in_place")
    assert standing_still(engine, for_s=2.5) is True
    engine.resume()
    engine.await_later(load)


def standing_still(engine: RawEngine, for_s: float) -> bool:
    """Whether the timestamp stays the same for so long, one change on the way into the pause allowed."""
    seen = [engine.load()["timestamp"]]
    since = time.monotonic()
    while time.monotonic() - since < for_s:
        now = engine.load()["timestamp"]
        if now != seen[-1]:
            seen.append(now)
            since = time.monotonic()
        if len(seen) > 2:
            return False
        time.sleep(0.1)
    return True


def test_a_request_in_prefill_shows_in_the_token_counts_alone(engine: RawEngine) -> None:
    """A request that is being prefilled is in no queue: nothing runs and nothing waits, but tokens are in use."""
    engine.slow_down(CRAWL_S)
    call = engine.begin(ids=long_prompt(20), tokens=1)
    load = engine.await_load(lambda load: bool(load["num_used_tokens"] >= CHUNK), "a prefill")
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    engine.slow_down(0)
    assert finish(answered(call))["type"] == "length"
    engine.await_load(lambda load: not load["num_used_tokens"] and not load["num_total_tokens"], "no tokens in use")


# Pause, flush, weights.


def test_pause_and_continue_want_a_body(engine: RawEngine) -> None:
    """Without a JSON body both are a 400; `{}` will do."""
    assert engine.post("/pause_generation").status_code == 400
    assert engine.post("/pause_generation", {}).status_code == 200
    assert engine.post("/continue_generation").status_code == 400
    assert engine.post("/continue_generation", {}).status_code == 200


def test_a_request_sent_during_a_pause_cannot_be_aborted_and_runs_afterwards(engine: RawEngine) -> None:
    """It is parked where no abort looks: the reason that a client must not send any."""
    engine.pause("in_place")
    with engine.unanswered(uuid4().hex, tokens=6) as connection:
        engine.abort_all()
        engine.resume()
        answer = connection.getresponse()
        assert answer.status == 200
        assert finish(json.loads(answer.read())) == {"type": "length", "length": 6}


def test_a_request_held_in_place_goes_on_where_it_was(engine: RawEngine) -> None:
    """An in-place pause neither ends nor restarts a running request."""
    engine.slow_down(SLOW_S)
    call = engine.begin(tokens=200)
    engine.await_counts(running=1)
    engine.pause("in_place")
    assert standing_still(engine, for_s=1.5) is True
    assert not call.done()
    engine.slow_down(0)
    engine.resume()
    body = answered(call)
    assert finish(body) == {"type": "length", "length": 200}
    assert len(body["output_ids"]) == 200


def test_an_abort_under_an_in_place_pause_is_answered_at_once_for_waiting_and_later_for_running(
    engine: RawEngine,
) -> None:
    """Waiting requests end in the pause; running ones are marked and end after it, with the tokens they had."""
    engine.slow_down(SLOW_S)
    running = [engine.begin() for _ in range(RUNNING_LIMIT)]
    engine.await_counts(running=RUNNING_LIMIT)
    waiting = engine.begin()
    engine.await_counts(running=RUNNING_LIMIT, waiting=1)
    engine.pause("in_place")
    engine.abort_all()
    assert finish(answered(waiting)) == {"type": "abort", "message": "Abort in waiting queue"}
    assert not any(call.done() for call in running)
    engine.resume()
    bodies = [answered(call) for call in running]
    assert {finish(body)["message"] for body in bodies} == {"Aborted"}
    assert all(0 < len(body["output_ids"]) < 1500 for body in bodies)


def test_an_abort_under_a_retract_pause_gives_back_only_whole_fifties(engine: RawEngine) -> None:
    """A retracted request waits again: what its scheduler had not told the front end yet, every 50 tokens, is lost."""
    engine.slow_down(SLOW_S / 2)
    call = engine.begin()
    engine.await_load(lambda load: bool(load["num_total_tokens"] > 60), "sixty tokens")
    engine.pause("retract")
    engine.abort_all()
    body = answered(call)
    meta = body["meta_info"]
    assert finish(body) == {"type": "abort", "message": "Abort in waiting queue"}
    assert len(body["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert len(body["output_ids"]) in range(50, 1500, 50)
    assert "prompt_tokens" not in meta


def test_a_pause_in_abort_mode_returns_after_everything_was_answered(engine: RawEngine) -> None:
    """Running and waiting requests alike are aborted first."""
    engine.slow_down(SLOW_S)
    calls = [engine.begin() for _ in range(RUNNING_LIMIT + 1)]
    engine.await_counts(running=RUNNING_LIMIT, waiting=1)
    engine.pause("abort")
    assert {finish(answered(call))["type"] for call in calls} == {"abort"}
    engine.resume()
    assert finish(engine.generate())["type"] == "length"


def test_flush_is_refused_while_a_request_runs(engine: RawEngine) -> None:
    """400 while busy, 200 once idle; the status is what counts."""
    engine.slow_down(SLOW_S)
    call = engine.begin()
    engine.await_counts(running=1)
    assert engine.post("/flush_cache").status_code == 400
    engine.abort_all()
    answered(call)
    engine.await_counts(running=0)
    assert engine.post("/flush_cache").status_code == 200


def test_flush_is_granted_while_a_request_is_retracted(engine: RawEngine) -> None:
    """A retract pause gives the cache back; the request starts over afterwards and loses nothing."""
    engine.slow_down(SLOW_S)
    call = engine.begin(tokens=200)
    engine.await_counts(running=1)
    engine.pause("retract")
    assert engine.post("/flush_cache").status_code == 200
    engine.slow_down(0)
    engine.resume()
    body = answered(call)
    assert finish(body) == {"type": "length", "length": 200}
    assert len(body["output_ids"]) == len(body["meta_info"]["output_token_logprobs"]) == 200


def test_new_weights_under_an_in_place_pause_split_the_output_into_spans(
    engine: RawEngine, checkpoints: tuple[str, str]
) -> None:
    """Each span says which version made which tokens, and /model_info tells the new one."""
    engine.slow_down(SLOW_S)
    before = engine.get("/model_info").json()["weight_version"]
    call = engine.begin(tokens=200)
    engine.await_counts(running=1)
    engine.pause("in_place")
    load_weights(engine, checkpoints[1], "contract-2")
    engine.slow_down(0)
    engine.resume()
    spans = answered(call)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, "contract-2"]
    assert [spans[0]["start"], spans[1]["end"]] == [0, 200]
    assert spans[0]["end"] == spans[1]["start"]
    assert engine.get("/model_info").json()["weight_version"] == "contract-2"
    load_weights(engine, checkpoints[0], before)


def load_weights(engine: RawEngine, path: str, version: str) -> None:
    """Updates from disk without flushing."""
    answer = engine.post(
        "/update_weights_from_disk", {"model_path": path, "weight_version": version, "flush_cache": False}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True


def test_weights_from_a_path_that_is_not_there_are_refused(engine: RawEngine) -> None:
    """400 with success false, and the engine goes on with the weights it has."""
    before = engine.get("/model_info").json()["weight_version"]
    answer = engine.post("/update_weights_from_disk", {"model_path": "/no/such/checkpoint", "flush_cache": False})
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert engine.get("/model_info").json()["weight_version"] == before
    assert finish(engine.generate())["type"] == "length"


# Routed experts.


def experts(body: dict[str, Any]) -> list[int]:
    """The expert ids of an answer: bare little-endian int32 in base64."""
    raw = base64.b64decode(body["meta_info"]["routed_experts"], validate=True)
    assert len(raw) % (4 * LAYERS * TOP_K) == 0
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]


def test_routed_experts_have_a_row_for_every_token_but_the_last(moe: RawEngine) -> None:
    """prompt + output - 1 rows of layers x top-k ids."""
    ids = experts(moe.generate(ids=range(10, 20), tokens=6, return_routed_experts=True))
    assert len(ids) == (10 + 6 - 1) * LAYERS * TOP_K
    assert set(ids) <= set(range(EXPERTS))


def test_routed_experts_begin_where_asked(moe: RawEngine) -> None:
    """A resumed sample asks for the new rows only."""
    body = moe.generate(ids=range(10, 20), tokens=6, return_routed_experts=True, routed_experts_start_len=10)
    assert len(experts(body)) == (6 - 1) * LAYERS * TOP_K


def test_routed_experts_come_with_an_aborted_request_too(moe: RawEngine) -> None:
    """A partial keeps its rows."""
    moe.slow_down(SLOW_S)
    rid = uuid4().hex
    call = moe.begin(rid, return_routed_experts=True)
    moe.await_load(lambda load: bool(load["num_total_tokens"] > 10), "ten tokens")
    moe.abort(rid)
    body = answered(call)
    assert finish(body)["type"] == "abort"
    assert len(experts(body)) == (3 + len(body["output_ids"]) - 1) * LAYERS * TOP_K


def test_routed_experts_are_absent_where_the_engine_has_none(engine: RawEngine) -> None:
    """A dense engine ignores the wish, it does not refuse it."""
    assert "routed_experts" not in engine.generate(return_routed_experts=True)["meta_info"]


# The connection.


@pytest.mark.real
def test_an_idle_connection_is_closed_by_the_server_after_five_seconds(real_llama: list[RealEngine]) -> None:
    """Why idle sockets must be retired earlier than that."""
    import socket
    from urllib.parse import urlsplit

    address = urlsplit(real_llama[0].url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=20) as peer:
        peer.sendall(b"GET /model_info HTTP/1.1\r\nHost: engine\r\n\r\n")
        assert peer.recv(65536).startswith(b"HTTP/1.1 200")
        quiet_since = time.monotonic()
        while peer.recv(65536):
            quiet_since = time.monotonic()
        assert 4.0 < time.monotonic() - quiet_since < 8.0
