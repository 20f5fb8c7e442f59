"""What the client takes for granted about SGLang's router, asked of the real one: who is behind it, what it drops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests

from rolloutsync.sim import SimConfig, SimFleet
from tests.real.kit import KitError
from tests.sim.kit import until

from . import router
from .router import FLAGS, QUICK, Router

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
SIM: dict[str, Any] = {"tokens_per_second": 1000.0, "health_poll_s": 0.05, "version": "0.5.23"}
NOBODY = "http://127.0.0.1:9"
SAMPLING = {"max_new_tokens": 5, "ignore_eos": True}
MANUAL = ("--policy", "manual", *QUICK)


@pytest.fixture(scope="module")
def python(report: Callable[[str], None]) -> Path:
    """The interpreter that has the router."""
    try:
        return router.ensure(report)
    except KitError as error:
        pytest.fail(f"no router: {error}", pytrace=False)


@pytest.fixture(scope="module")
def engines() -> Iterator[SimFleet]:
    """Three engines."""
    with SimFleet(configs=[SimConfig(**SIM) for _ in range(3)]) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def front(python: Path, engines: SimFleet) -> Iterator[Router]:
    """A router before the first two."""
    with Router(python, engines.urls[:2]) as started:
        yield started


@pytest.fixture
def before_the_guard(front: Router, engines: SimFleet) -> None:
    """Router and engines outlive a test, which finds two engines at the router and all ledgers empty."""
    until(front.healthy, lambda healthy: healthy == set(engines.urls[:2]), "two healthy engines")
    for engine in engines.engines:
        engine.reset()


def served(engines: SimFleet) -> list[int]:
    """How many generations each engine was asked for."""
    return [engine.state()["requests"].get("/generate", 0) for engine in engines.engines]


def generate(front: Router, key: str | None = None, **fields: object) -> requests.Response:
    """One short generation through the router."""
    headers = {} if key is None else {"X-SMG-Routing-Key": key}
    body = {"rid": uuid4().hex, "input_ids": [5, 6], "sampling_params": SAMPLING, **fields}
    return front.session.post(f"{front.url}/generate", json=body, headers=headers, timeout=30)


# Router or engine.


def test_one_look_tells_a_router_from_an_engine(front: Router, engines: SimFleet) -> None:
    """`GET /workers` is a list at the one and a 404 at the other; what the router has not is a 404 without a body."""
    answer = front.session.get(f"{front.url}/workers", timeout=5)
    assert answer.json().keys() == {"workers", "total", "stats"}
    assert answer.json()["stats"] == {"prefill_count": 0, "decode_count": 0, "regular_count": 2}
    assert front.session.get(f"{engines[0]}/workers", timeout=5).status_code == 404
    for path in ("/list_workers", "/model_info", "/server_info", "/v1/loads", "/version", "/is_paused"):
        answer = front.session.get(front.url + path, timeout=5)
        assert (answer.status_code, answer.content) == (404, b"")
        assert "content-type" not in answer.headers


def test_some_answers_look_like_an_engine(front: Router) -> None:
    """The model's information is the first worker's, and the router is healthy whatever its workers are."""
    assert front.session.get(f"{front.url}/get_model_info", timeout=5).json()["model_path"] == "sim-model"
    assert front.session.get(f"{front.url}/health", timeout=5).text == "OK"
    info = front.session.get(f"{front.url}/get_server_info", timeout=5).json()
    assert info == {"router_manager": True, "routers_count": 1, "workers_count": 2}


def test_control_does_not_go_through(front: Router) -> None:
    """Neither aborts nor pauses nor weights."""
    for path in ("/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        assert front.session.post(front.url + path, json={}, timeout=5).status_code == 404


# Membership.


def test_a_worker_is_listed_with_its_kind_and_its_health(front: Router, engines: SimFleet) -> None:
    """All that discovery needs; numbers among the metadata are text."""
    for worker in front.workers():
        assert worker["url"] in engines.urls
        assert (worker["worker_type"], worker["connection_mode"], worker["is_healthy"]) == ("regular", "HTTP", True)
        assert worker["metadata"]["dp_size"] == "1"


def test_workers_come_and_go(front: Router, engines: SimFleet) -> None:
    """Adding is answered before it is done, and removing wants the router's own id."""
    third = engines.urls[2]
    worker_id = front.add(third)
    until(front.healthy, lambda healthy: healthy == set(engines), "three healthy engines")
    assert worker_id in {worker["id"] for worker in front.workers()}
    by_url = front.session.delete(f"{front.url}/workers/{third.replace('/', '%2F')}", timeout=5)
    assert (by_url.status_code, by_url.json()["code"]) == (400, "BAD_REQUEST")
    front.remove(worker_id)
    until(front.healthy, lambda healthy: healthy == set(engines.urls[:2]), "two healthy engines")
    gone = front.session.get(f"{front.url}/workers/{worker_id}", timeout=5)
    assert (gone.status_code, gone.json()["code"]) == (404, "WORKER_NOT_FOUND")


def test_an_engine_that_does_not_answer_is_accepted_and_never_listed(front: Router) -> None:
    """Only its own page knows of it, with nothing known about it."""
    worker_id = front.add(NOBODY)
    page = front.session.get(f"{front.url}/workers/{worker_id}", timeout=5).json()
    assert (page["worker_type"], page["is_healthy"], page["job_status"]["status"]) == ("unknown", False, "processing")
    assert NOBODY not in {worker["url"] for worker in front.workers()}
    front.remove(worker_id)


def test_a_dead_worker_stays_in_the_list(front: Router, engines: SimFleet) -> None:
    """Marked as not healthy after some checks, so until then its place in the list means nothing."""
    engines.engines[0].kill()
    until(front.healthy, lambda healthy: healthy == {engines[1]}, "one healthy engine")
    assert len(front.workers()) == 2
    engines.engines[0].restart()
    until(front.healthy, lambda healthy: healthy == set(engines.urls[:2]), "two healthy engines")


# What gets lost.


def test_unknown_fields_and_parameters_are_dropped_without_a_word(front: Router, engines: SimFleet) -> None:
    """Where the engine itself would answer, or refuse."""
    body = {"input_ids": [5], "return_prompt_token_ids": True, "sampling_params": {**SAMPLING, "no_such": 1}}
    assert front.session.post(f"{engines[0]}/generate", json=body, timeout=30).status_code == 400
    answer = generate(front, return_prompt_token_ids=True, sampling_params={**SAMPLING, "no_such": 1})
    assert answer.status_code == 200
    assert "prompt_token_ids" not in answer.json()
    assert generate(front, rid=["x"]).status_code == 422


def test_a_lost_request_is_sent_again_under_the_same_id(python: Path, engines: SimFleet) -> None:
    """To another worker, where retries are on, as they are by default: one id can run twice."""
    first, second, _ = engines.engines
    long: dict[str, object] = {"sampling_params": {**SAMPLING, "max_new_tokens": 1500}}
    with Router(python, engines.urls[:2], flags=("--policy", "round_robin", *QUICK)) as front:
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(generate, front, None, **long) for _ in range(4)]
            until(lambda: (first.state()["running"], second.state()["running"]), lambda at: at == (2, 2), "2 on each")
            first.kill()
            assert [call.result().status_code for call in calls] == [200] * 4
        assert second.state()["requests"]["/generate"] == 4
        first.restart()


# Ranks, stickiness, disaggregation.


def test_ranks_are_workers_of_their_own_if_it_knows_of_them(python: Path) -> None:
    """`url@rank`, where only the url can be dialled."""
    with (
        SimFleet(configs=[SimConfig(**SIM, dp_size=2)]) as fleet,
        Router(python, fleet.urls, flags=(*FLAGS, "--dp-aware")) as front,
    ):
        assert front.healthy() == {f"{fleet[0]}@0", f"{fleet[0]}@1"}
        ranks = [generate(front).json()["meta_info"]["dp_rank"] for _ in range(4)]
        assert sorted(ranks) == [0, 0, 1, 1]


def test_a_routing_key_is_sticky_under_the_manual_policy_alone(python: Path, front: Router, engines: SimFleet) -> None:
    """Elsewhere the header is not looked at."""
    with Router(python, engines.urls, flags=MANUAL) as sticky:
        for key in ("a", "b", "c"):
            before = served(engines)
            assert [generate(sticky, key).status_code for _ in range(6)] == [200] * 6
            assert sorted(now - then for now, then in zip(served(engines), before, strict=True)) == [0, 0, 6]
    before = served(engines)
    assert [generate(front, "a").status_code for _ in range(6)] == [200] * 6
    assert [now - then for now, then in zip(served(engines), before, strict=True)] == [3, 3, 0]


def test_a_disaggregated_fleet_is_listed_by_kind_and_generates_in_pairs(python: Path, engines: SimFleet) -> None:
    """Each request goes to one that prefills and one that decodes, the same pair for one key; with log-probabilities
    the answer's content type is not even JSON's."""
    first, *others = engines.urls
    with Router(python, others, prefill=[first], flags=MANUAL) as front:
        kinds = {worker["url"]: worker["worker_type"] for worker in front.workers()}
        assert kinds == {first: "prefill", **dict.fromkeys(others, "decode")}
        (prefill,) = (worker for worker in front.workers() if worker["worker_type"] == "prefill")
        assert prefill["bootstrap_port"] == int(router.BOOTSTRAP_PORT)
        assert [generate(front, "key").status_code for _ in range(4)] == [200] * 4
        assert served(engines)[0] == 4
        assert sorted(served(engines)[1:]) == [0, 4]
        answer = generate(front, return_logprob=True)
        assert len(answer.json()["meta_info"]["output_token_logprobs"]) == 5
        assert answer.headers["content-type"] == "application/octet-stream"
