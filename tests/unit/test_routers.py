"""What routers say of their workers, in every form that was seen or told of, and what they drop."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutsync import ProtocolError, RolloutError, UnsupportedError
from rolloutsync.routers import Listing, Role, Worker, check_kept, lost, read_listing

A, B, C = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://[fd00::1]:30000"


def entry(url: str = A, **facts: Any) -> dict[str, Any]:
    """An entry of sglang-router 0.3.2, shortened."""
    known = {"id": "01a2", "url": url, "model_id": "m", "priority": 50, "cost": 1.0, "worker_type": "regular"}
    rest = {"is_healthy": True, "load": 0, "connection_mode": "HTTP", "metadata": {"dp_size": "1"}}
    return {**known, **rest, "disable_health_check": False, **facts}


def listed(*entries: Any) -> Listing:
    return read_listing({"workers": list(entries), "total": len(entries), "stats": {"regular_count": len(entries)}})


# --- forms ---


@pytest.mark.parametrize(
    "answer",
    [
        {"workers": [entry(A), entry(B)], "total": 2, "stats": {}},
        {"workers": [entry(A, id=A, connection_mode="Http"), entry(B, id=B, connection_mode="Http")]},  # 0.2.1
        {"workers": [entry(A, runtime_type="sglang", status="ready"), entry(B, runtime_type="sglang")]},  # smg 1.13
        {"workers": [{"url": f"{A}@0", "base_url": A}, {"url": f"{A}@1", "base_url": A}, {"base_url": B}]},
        {"workers": [A, f"{B}/"]},
        {"urls": [A, B]},
        {"urls": [f"{A}@1", f"{B}@0", f"{A}@0", f"{B}@1"]},
    ],
)
def test_every_form(answer: Any) -> None:
    """Objects or bare URLs, with ranks or without, under either name: each engine once, in the router's order."""
    listing = read_listing(answer)
    assert listing.urls == (A, B)
    assert not listing.disaggregated


def test_ranks_are_one_engine() -> None:
    """Healthy while any of them is; a path, an IPv6 address and a port keep what looks a little like a rank."""
    listing = listed(entry(f"{C}/x@y@1", is_healthy=False), entry(f"{C}/x@y@0"), entry(f"{C}/x@y"))
    assert listing.workers == (Worker(f"{C}/x@y", ranks=3, healthy=True, model="m"),)


def test_an_url_in_two_forms_is_one_engine() -> None:
    """As registered with and without a slash, or with the scheme's own port."""
    assert listed(entry("http://h:80/"), entry("http://H")).urls == ("http://h",)


def test_dead_workers_are_listed() -> None:
    """The router's word is minutes old: whoever dials finds out."""
    assert [worker.healthy for worker in listed(entry(A, is_healthy=False), entry(B)).workers] == [False, True]
    assert [worker.healthy for worker in read_listing({"urls": [A]}).workers] == [None]


@pytest.mark.parametrize("kind", ["prefill", "Prefill", {"Prefill": {"bootstrap_port": 8998}}, {"prefill": None}])
def test_roles(kind: Any) -> None:
    """Prefill and decode, in whatever spelling; one of them is enough for a fleet that cannot be dialled."""
    listing = listed(entry(A, worker_type=kind, bootstrap_port=8998), entry(B, worker_type="decode"), entry(C))
    assert [worker.role for worker in listing.workers] == [Role.PREFILL, Role.DECODE, Role.REGULAR]
    assert listing.disaggregated


@pytest.mark.parametrize("kind", ["unknown", "regular", None, 7, {}])
def test_other_roles_are_regular(kind: Any) -> None:
    """A word that says nothing."""
    assert not listed(entry(worker_type=kind)).disaggregated


def test_a_role_is_not_lost_among_ranks() -> None:
    """Whichever entry names it."""
    roles = [listed(*pair).workers[0].role for pair in _orders(entry(A, worker_type="decode"), entry(f"{A}@1"))]
    assert roles == [Role.DECODE, Role.DECODE]


def _orders(one: Any, other: Any) -> list[tuple[Any, Any]]:
    return [(one, other), (other, one)]


def test_a_vllm_worker_has_no_metadata() -> None:
    """And the router does not know its model."""
    told = {key: value for key, value in entry(model_id="unknown").items() if key != "metadata"}
    assert listed(told).workers == (Worker(A, healthy=True),)


def test_newer_routers_pass_fields_on() -> None:
    """They are known by what they say of each worker; an empty list says nothing."""
    assert listed(entry(runtime_type="sglang")).forwards_all
    assert not listed(entry(runtime_type="sglang"), entry(B)).forwards_all
    assert not listed().forwards_all


def test_nobody_is_listed() -> None:
    """Which is a list all the same."""
    assert read_listing({"workers": [], "total": 0}).workers == read_listing({"urls": []}).workers == ()


# --- what cannot be driven ---


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ({"detail": "Not Found"}, ProtocolError, "not a router's list of workers"),
        ({"workers": {"a": 1}}, ProtocolError, "not a router's list of workers"),
        ("Not Found", ProtocolError, "not a router's list of workers"),
        ([A], ProtocolError, "not a router's list of workers"),
        (None, ProtocolError, "not a router's list of workers"),
        ({"workers": [{"id": "x"}]}, ProtocolError, "a worker without a URL: {'id': 'x'}"),
        ({"workers": [7]}, ProtocolError, "a worker without a URL"),
        ({"urls": [None]}, ProtocolError, "a worker without a URL"),
        ({"urls": ["10.0.0.1:30000"]}, ProtocolError, "nobody can dial: .*must start with http"),
        ({"urls": ["http://me@h:1"]}, ProtocolError, "nobody can dial: .*user info"),
        ({"urls": ["grpc://10.0.0.1:5"]}, UnsupportedError, "gRPC with its worker grpc://10.0.0.1:5"),
        ({"workers": [entry(connection_mode="gRPC")]}, UnsupportedError, f"gRPC with its worker {A}"),
        ({"workers": [entry(connection_mode={"Grpc": {"port": 1}})]}, UnsupportedError, "gRPC"),
        ({"workers": [entry(A), entry(B, model_id="judge")]}, UnsupportedError, f"several models.*{A}.*judge.*{B}"),
        (
            {"workers": [entry(A, worker_type="decode", runtime_type="vllm")]},
            UnsupportedError,
            f"{A} is vllm, not SGLang",
        ),
    ],
)
def test_lists_that_are_refused(answer: Any, kind: type[RolloutError], words: str) -> None:
    """By name."""
    with pytest.raises(kind, match=words):
        read_listing(answer)


# --- what is dropped ---


def test_what_older_routers_drop() -> None:
    """Routed experts, ids of the prompt and all that they do not know; a flag that is off asks for nothing."""
    fields = {
        "return_logprob": True,
        "priority": 3,
        "session_id": "s",  # told by a header
        "return_routed_experts": True,
        "return_prompt_token_ids": False,
        "routed_dp_rank": 0,
        "mine": 1,
    }
    sampling = ["temperature", "top_p", "logit_bias", "custom_params"]
    dropped = ["return_routed_experts", "routed_dp_rank", "mine"]
    named = ["sampling_params['logit_bias']", "sampling_params['custom_params']"]
    assert lost(fields, sampling, forwards_all=False) == [*dropped, *named]
    assert lost(fields, sampling, forwards_all=True) == named[:1]


def test_a_refusal_says_why() -> None:
    """With the router, the names, and that nothing was sent."""
    with pytest.raises(UnsupportedError, match=r"drops return_routed_experts without a word.*nothing was sent") as told:
        check_kept({"return_routed_experts": True}, [], router=A, forwards_all=False)
    assert told.value.engine == A
    check_kept({"return_routed_experts": True}, ["top_k"], router=A, forwards_all=True)
