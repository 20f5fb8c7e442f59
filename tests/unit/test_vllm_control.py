"""vLLM's control calls: abort, load, facts, pause, memory, weights, and which family a server belongs to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutsync.dialects.base import Call, Facts, LoadKind, merged
from rolloutsync.dialects.family import PROBES, Family, family
from rolloutsync.dialects.vllm_load import read_metrics, read_server_load

from .vllm_recorded import DIALECT, recorded

_WEIGHTS = DIALECT.weights
_RID = "ab" * 16


def _json(call: Call) -> Any:
    return json.loads(call.body or b"null")


# --- abort ------------------------------------------------------------------------------------------------------------


def test_an_abort_names_the_request_as_either_route_does() -> None:
    """Unknown ids do no harm."""
    first, second = DIALECT.abort_ways(_RID)
    names = [f"generate-tokens-{_RID}", f"cmpl-{_RID}-0"]
    assert [(call.path, _json(call)) for call in (*first, *second)] == [
        ("/abort_requests", {"request_ids": names}),
        ("/inference/v1/abort_requests", {"request_ids": names}),
    ]
    assert DIALECT.abort(_RID) == first[0]


def test_an_abort_of_all_has_a_body() -> None:
    """Without one it is a 400; before 0.26 a pause does it."""
    first, second = DIALECT.abort_ways(None)
    assert [(call.path, _json(call)) for call in first] == [("/abort_requests", {})]
    assert [call.path for call in second] == ["/pause?mode=abort&clear_cache=false", "/resume"]
    assert recorded("abort_requests_all").status == 400


# --- load -------------------------------------------------------------------------------------------------------------


def _metrics(*lines: str) -> str:
    return "\n".join(("# HELP x y", "# TYPE x gauge", "process_max_fds 20000.0", *lines)) + "\n"


def _gauge(name: str, value: object, engine: object = 0, model: str = "tiny") -> str:
    return f'vllm:num_requests_{name}{{engine="{engine}",model_name="{model}"}} {value}'


@pytest.mark.parametrize(
    ("name", "kind", "running", "waiting"),
    [("metrics_idle", LoadKind.ZERO, 0, 0), ("metrics_12_inflight", LoadKind.BUSY, 4, 8)],
)
def test_recorded_metrics(name: str, kind: LoadKind, running: int, waiting: int) -> None:
    """Running and waiting, and nothing else that begins like them."""
    reading = read_metrics(recorded(name).body.decode(), 1)
    assert (reading.kind, reading.running, reading.waiting, reading.stamps) == (kind, running, waiting, None)


def test_every_rank_counts() -> None:
    """Of data parallelism, and of several models."""
    lines = [_gauge("running", 1.0, 0), _gauge("running", 2.0, 1), _gauge("waiting", 0.0, 0), _gauge("waiting", 3.0, 1)]
    reading = read_metrics(_metrics(*lines), 2)
    assert (reading.kind, reading.running, reading.waiting) == (LoadKind.BUSY, 3, 3)


_IDLE = (_gauge("running", 0.0), _gauge("waiting", 0.0))


@pytest.mark.parametrize(
    "text",
    [
        _metrics(*_IDLE),
        _metrics("vllm:num_requests_running 0", "vllm:num_requests_waiting 0"),
        _metrics(*(f"{line} 1700000000000" for line in _IDLE)),
        _metrics(*_IDLE).replace("\n", "\r\n"),
        _metrics(_gauge("running", 0, model="a}b"), _gauge("waiting", 0, model="a}b")),
        _metrics(_gauge("running", 0, model='a\\"b'), _gauge("waiting", 0, model='a\\"b')),
        _metrics(*_IDLE, _gauge("waiting_by_reason", 5.0), "vllm:num_requests_running_total 7"),
    ],
)
def test_idle_metrics(text: str) -> None:
    """In every form that the exposition format has."""
    assert read_metrics(text, 1).kind is LoadKind.ZERO


@pytest.mark.parametrize(
    ("text", "dp_size"),
    [
        (None, 1),
        ({}, 1),
        (0, 1),
        ("", 1),
        ("<html></html>", 1),
        (_metrics(), 1),
        (_metrics(_IDLE[0]), 1),
        (_metrics(_IDLE[1]), 1),
        (_metrics(*_IDLE, _IDLE[0]), 1),
        (_metrics(_gauge("running", 0, 0), _gauge("waiting", 0, 1)), 1),
        (_metrics(*_IDLE), 2),
        (_metrics(_gauge("running", 0, model="a"), _gauge("running", 0, model="b"), _IDLE[1]), 1),
        *(
            (_metrics(_gauge("running", bad), _IDLE[1]), 1)
            for bad in ("NaN", "+Inf", "-1", "0.5", "", "x", "1e400", "0 0 0")
        ),
        (_metrics('vllm:num_requests_running{engine="0 0', _IDLE[1]), 1),
    ],
)
def test_metrics_that_prove_nothing(text: Any, dp_size: int) -> None:
    """Unknown, never idle."""
    reading = read_metrics(text, dp_size)
    assert reading.kind is LoadKind.UNKNOWN
    assert reading.why


@given(st.text(alphabet='vllm:num_requests_running{}waiting engine="0",\\ \n0.1eNa#-+', max_size=200))
def test_no_text_is_idle_by_accident(noise: str) -> None:
    """Noise around a busy engine leaves it busy or unknown."""
    text = f"{noise}\n{_metrics(_gauge('running', 2.0), _IDLE[1])}"
    assert read_metrics(text, 1).kind is not LoadKind.ZERO
    assert read_metrics(noise, 1).kind is not LoadKind.BUSY or "vllm:num_requests_" in noise


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1))
def test_metrics_add_up(ranks: dict[int, tuple[int, int]]) -> None:
    """Over all ranks, in any notation."""
    lines = [_gauge("running", float(running), rank) for rank, (running, _) in ranks.items()]
    lines += [_gauge("waiting", float(waiting), rank) for rank, (_, waiting) in ranks.items()]
    reading = read_metrics(_metrics(*lines), len(ranks))
    assert reading.running == sum(running for running, _ in ranks.values())
    assert reading.waiting == sum(waiting for _, waiting in ranks.values())


def test_the_servers_own_count_shows_work_and_proves_nothing() -> None:
    """A zero may mean that nobody counts."""
    busy = read_server_load(recorded("load_busy").answer)
    assert (busy.kind, busy.running) == (LoadKind.BUSY, 1)
    assert read_server_load(recorded("load_idle").answer).kind is LoadKind.UNKNOWN
    odds: tuple[Any, ...] = (None, {}, [], "7", {"server_load": True}, {"server_load": -1}, {"server_load": "3"})
    assert {read_server_load(odd).kind for odd in odds} == {LoadKind.UNKNOWN}


def test_load_calls() -> None:
    """Each is read by what it is."""
    (metrics,), (load,) = DIALECT.load_calls(), DIALECT.work_calls()
    assert DIALECT.read_load(metrics, _metrics(*_IDLE), 1).kind is LoadKind.ZERO
    assert DIALECT.read_load(load, {"server_load": 2}, 1).kind is LoadKind.BUSY


# --- facts ------------------------------------------------------------------------------------------------------------


def test_facts() -> None:
    """From three answers, each for what the others leave open."""
    server, models, version = (
        DIALECT.read_facts(recorded(name).answer) for name in ("server_info", "models", "version")
    )
    assert server == Facts(dp_size=1, tp_size=1, front_ends=1, running_limit=4, model_path="tiny-llama")
    assert models == Facts(model_path="tiny-llama")
    assert merged(models, version) == Facts(model_path="tiny-llama", version="0.32.0")
    assert merged(server, Facts(dp_size=9, version="1")).dp_size == 1


@pytest.mark.parametrize(
    ("parallel", "ranks", "workers", "limit"),
    [
        ({"data_parallel_size": 4, "world_size": 2}, 4, 8, 40),
        ({"data_parallel_size": 4, "world_size": 2, "data_parallel_external_lb": True}, 1, 8, 10),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, 2, None, 20),
        ({}, None, None, 10),
        (None, None, None, 10),
    ],
)
def test_ranks(parallel: Any, ranks: int | None, workers: int | None, limit: int) -> None:
    """Of this URL for the load, of all for a weight group."""
    answer = {"vllm_config": {"parallel_config": parallel, "scheduler_config": {"max_num_seqs": 10}}}
    facts = DIALECT.read_facts(answer)
    assert (facts.dp_size, facts.tp_size, facts.running_limit) == (ranks, workers, limit)


@pytest.mark.parametrize("answer", [None, [], "x", {}, {"data": [None, 7]}, {"vllm_config": "text"}, {"version": 7}])
def test_odd_facts_are_unknown(answer: Any) -> None:
    """Whatever the server says."""
    assert DIALECT.read_facts(answer) == Facts()


def test_the_model_and_not_its_adapters() -> None:
    """Adapters have a parent."""
    models = {"data": [{"root": "adapter", "parent": "base"}, {"root": "base", "parent": None}]}
    assert DIALECT.read_facts(models).model_path == "base"


def test_the_weight_version() -> None:
    """From 0.28 on."""
    assert DIALECT.version_call().path == "/weight_info"
    assert DIALECT.read_version(recorded("weight_info").answer) == "default"
    assert DIALECT.read_version([]) is None
    assert DIALECT.reach_call().path == "/version"
    assert [call.path for call in DIALECT.scheduler_calls()] == [recorded("is_sleeping").path]


# --- pause and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "word"), [("abort", "abort"), ("wait", "wait"), ("keep", "keep"), ("in_place", "keep")]
)
def test_pause(mode: str, word: str) -> None:
    """The cache is left alone; only waiting takes long."""
    call = DIALECT.pause(mode)
    assert (call.path, call.body, call.long) == (f"/pause?mode={word}&clear_cache=false", None, word == "wait")


def test_unknown_pause_modes() -> None:
    """The others are named."""
    with pytest.raises(ValueError, match=r"abort.*retract"):
        DIALECT.pause("retract")
    with pytest.raises(ValueError, match=r"abort.*hold.*wait.*retract"):
        _WEIGHTS.pause_mode("retract")
    assert [_WEIGHTS.pause_mode(mode) for mode in _WEIGHTS.modes] == ["keep", "keep", "wait"]


@pytest.mark.parametrize(
    ("status", "body", "paused"),
    [
        (503, b'{"error":{"message":"Generation is paused. Please retry after it resumes.","code":503}}', True),
        (503, b'{"error":{"message":"queue full","code":503}}', False),
        (400, b'{"error":{"message":"paused"}}', False),
    ],
)
def test_an_engine_that_says_it_is_paused(status: int, body: bytes, paused: bool) -> None:
    """From 0.33 on."""
    assert DIALECT.says_paused(status, body) is paused


@pytest.mark.parametrize(
    ("tags", "release", "resume"),
    [
        (None, "/sleep?level=1", "/wake_up"),
        (["kv_cache", "weights"], "/sleep?level=1", "/wake_up"),
        (["cuda_graph", "kv_cache", "weights"], "/sleep?level=1", "/wake_up"),
        (["kv_cache"], "/release_kv_cache_memory", "/wake_up?tags=kv_cache"),
    ],
)
def test_memory(tags: list[str] | None, release: str, resume: str) -> None:
    """Long calls that are never sent twice."""
    assert (DIALECT.release_memory(tags).path, DIALECT.resume_memory(tags).path) == (release, resume)
    assert DIALECT.release_memory(tags).long
    assert DIALECT.resume_memory(tags).long


def test_memory_that_vllm_cannot_release() -> None:
    """Weights go with the cache only; unknown tags are named."""
    for tags, words in ((["weights"], "weights"), (["cuda_graph"], "cuda_graph"), (["x"], "'x'"), ([], r"not \[\]")):
        with pytest.raises(ValueError, match=words):
            DIALECT.release_memory(tags)
    assert DIALECT.resume_memory(["weights"]).path == "/wake_up?tags=weights"


@pytest.mark.parametrize(
    ("path", "status", "words", "hint"),
    [
        ("/abort_requests", 404, "Not Found", "VLLM_SERVER_DEV_MODE=1"),
        ("/abort_requests", 404, "Not Found", "from 0.26 on"),
        ("/pause?mode=keep", 405, "Method Not Allowed", "/pause from 0.16 on"),
        ("/pause?mode=keep", 500, "no", None),
        ("/nonsense", 404, "Not Found", None),
        ("/sleep?level=1", 500, "Sleep mode is not enabled", "--enable-sleep-mode"),
        ("/init_weight_transfer_engine", 500, "Weight transfer not configured.", "--weight-transfer-config"),
    ],
)
def test_hints(path: str, status: int, words: str, hint: str | None) -> None:
    """How to start the server, where that is the matter."""
    said = DIALECT.hint(Call(method="POST", path=path), status, words)
    assert (hint in said) if hint else said == ""


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_from_disk() -> None:
    """By the worker's own method."""
    call = _WEIGHTS.from_disk("/ckpt", {"is_checkpoint_format": True})
    kwargs = {"is_checkpoint_format": True, "weights_path": "/ckpt"}
    assert (call.path, _json(call), call.long) == (
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": kwargs},
        True,
    )


def test_weights_from_a_broadcast() -> None:
    """Within a session; the label comes after."""
    call = _WEIGHTS.from_distributed(["a"], ["bfloat16"], [(2, 3)], "g", {"packed": True})
    info = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "packed": True}
    assert (call.path, _json(call)) == ("/update_weights", {"update_info": info})
    assert (_WEIGHTS.begin.path, _json(_WEIGHTS.begin)) == ("/start_weight_update", {})
    assert (_WEIGHTS.end.path, _json(_WEIGHTS.end)) == ("/finish_weight_update", {})
    assert _json(_WEIGHTS.set_version("7")) == {"new_version": "7"}
    where = {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 3}
    assert _json(_WEIGHTS.init_group("h", 1, 2, 3, "g", "nccl")) == {"init_info": where}


def test_weights_from_tensors() -> None:
    """Handles of all ranks at once, or of each."""
    told = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    one = _WEIGHTS.from_tensor([b"ab", b"ab"], told)
    assert _json(one) == {"update_info": {**told, "ipc_handles_pickled": "YWI="}}
    assert [rank["ipc_handles_pickled"] for rank in _json(_WEIGHTS.from_tensor(["x", "y"], told))["update_info"]] == [
        "x",
        "y",
    ]
    with pytest.raises(ValueError, match="dtype_names, shapes"):
        _WEIGHTS.from_tensor(["x"], {"names": ["a"]})


def test_refusals() -> None:
    """Also those that are answered with 200."""
    assert _WEIGHTS.refusal({"message": "Weights updated"}) is None
    assert _WEIGHTS.refusal("") is None
    assert _WEIGHTS.refusal(recorded("reset_prefix_cache").answer) is None
    assert _WEIGHTS.refusal({"success": False}) is not None
    assert _WEIGHTS.refusal({"error": "no"}) == "no"
    assert _WEIGHTS.already_open("start_weight_update called while a weight update is already active.")
    assert _WEIGHTS.no_such_group("POST /shutdown_weight_transfer_engine answered 404: Not Found")
    assert not _WEIGHTS.no_such_group("POST /shutdown_weight_transfer_engine answered 500: x")
    assert not _WEIGHTS.applied(400, "weights were updated, but")


def test_checksums() -> None:
    """One sum, whatever the order of its parts."""
    one = _WEIGHTS.read_checksum({"checksums": {"a": "1", "b": "2"}})
    assert one is not None
    assert one == _WEIGHTS.read_checksum({"checksums": {"b": "2", "a": "1"}})
    assert one != _WEIGHTS.read_checksum({"checksums": {"b": "1", "a": "2"}})
    odds: tuple[Any, ...] = (None, {}, {"checksums": {}}, {"checksums": []})
    assert {_WEIGHTS.read_checksum(odd) for odd in odds} == {None}


@pytest.mark.parametrize(("version", "keeps"), [("0.26.1", False), ("0.27.0", True), (None, True), ("0.1.dev0", True)])
def test_labels(version: str | None, keeps: bool) -> None:
    """From 0.27 on."""
    assert _WEIGHTS.keeps_label(Facts(version=version)) is keeps


# --- families ---------------------------------------------------------------------------------------------------------

_ROUTER = {"workers": [], "total": 0}
_MODEL = {"model_path": "m", "weight_version": "1"}


def _probed(answers: dict[str, Any]) -> tuple[Family | None, int]:
    """The family, and how many probes it took."""
    seen: dict[str, Any] = {}
    for number, probe in enumerate(PROBES, 1):
        seen[probe.path] = answers.get(probe.path)
        if (found := family(seen)) is not None:
            return found, number
    return None, len(PROBES)


@pytest.mark.parametrize(
    ("answers", "found", "probes"),
    [
        ({"/version": {"version": "0.32.0"}}, Family.VLLM, 1),
        ({"/model_info": _MODEL, "/get_model_info": _MODEL}, Family.SGLANG, 3),
        ({"/get_model_info": _MODEL}, Family.SGLANG, 5),
        ({"/workers": _ROUTER, "/get_model_info": _MODEL}, Family.ROUTER, 2),
        ({"/workers": _ROUTER, "/model_info": _MODEL}, Family.ROUTER, 2),
        ({"/list_workers": {"urls": ["http://a"]}, "/get_model_info": _MODEL}, Family.ROUTER, 4),
        ({}, None, 5),
        ({"/version": "x", "/workers": [], "/model_info": {}, "/list_workers": 7}, None, 5),
        ({"/version": {"version": ""}, "/workers": {"workers": 7}, "/model_info": {"model_path": None}}, None, 5),
    ],
)
def test_families(answers: dict[str, Any], found: Family | None, probes: int) -> None:
    """A router is never taken for the engine behind it; a mock that answers nothing is nothing."""
    assert _probed(answers) == (found, probes)


def test_a_real_engine_is_known_by_its_first_answer() -> None:
    """And its family's name is the dialect's."""
    assert family({recorded("version").path: recorded("version").answer}) is Family.VLLM
    assert str(Family.VLLM) == DIALECT.name
