"""The pure parts of the benchmark suite, and its load server. Nothing here measures time."""

from __future__ import annotations

import http.client
import importlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.processes import ROOT, run

RID = "0123456789abcdef" * 2
Part = Callable[[str], Any]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    """Imports a module of benchmarks/, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def shape(part: Part) -> Any:
    return part("harness.work").Shape(prompt_tokens=3, tokens=5, layers=2, topk=4)


def body_of(answer: bytes) -> bytes:
    """Of a whole HTTP answer whose Content-Length is right."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head
    return body


def rows_of(part: Part, **figures: list[float]) -> list[Any]:
    """One row for each client of one case, with CPU figures."""
    row = part("harness.figures").Row
    return [row("stress", "64 in flight", who, [{"cpu_ms": one} for one in values]) for who, values in figures.items()]


# --- figures ---


def test_a_spread_is_least_median_and_most(part: Part) -> None:
    found = part("harness.figures").spread([3.0, 1.0, 10.0])
    assert (found.least, found.median, found.most) == (1.0, 3.0, 10.0)
    assert part("harness.figures").spread([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="at least one"):
        part("harness.figures").spread([])


def test_a_ratio_is_one_of_medians_and_none_where_something_was_not_measured(part: Part) -> None:
    ratio = part("harness.figures").ratio
    rows = rows_of(part, ours=[1.0, 2.0, 90.0], aiohttp=[4.0])
    assert ratio(rows, "64 in flight", "cpu_ms", "ours", "aiohttp") == 0.5
    assert ratio(rows, "64 in flight", "cpu_ms", "httpx", "ours") is None
    assert ratio(rows, "64 in flight", "wall_s", "ours", "aiohttp") is None
    assert ratio(rows, "65 in flight", "cpu_ms", "ours", "aiohttp") is None


@pytest.mark.parametrize(("value", "met"), [(0.9, True), (1.0, True), (1.01, False), (None, None)])
def test_a_target_is_met_up_to_its_limit(part: Part, value: float | None, met: bool | None) -> None:
    assert part("harness.figures").at_most("stress", "words", value, 1.0).met is met
    upside_down = None if value is None else 2.0 - value
    assert part("harness.figures").at_least("stress", "words", upside_down, 1.0).met is met


@pytest.mark.parametrize(("ours", "words"), [(1.0, ["met"]), (3.0, ["NOT met"])])
def test_stress_is_judged_by_aiohttp(part: Part, ours: float, words: list[str]) -> None:
    verdicts = part("stress").judge(rows_of(part, ours=[ours], aiohttp=[2.0]))
    tables = part("harness.tables")
    table = tables.targets_table(verdicts)
    cells = [str(cell) for cell in table.columns[-1].cells]
    assert [cell.partition("]")[2].removesuffix("[/]") for cell in cells] == words


def test_a_target_whose_clients_did_not_run_is_not_judged(part: Part) -> None:
    assert part("stress").judge(rows_of(part, ours=[1.0])) == []
    assert part("abort").judge(rows_of(part, ours=[1.0])) == []


def test_abort_is_judged_by_the_slowest_engine(part: Part) -> None:
    row, abort = part("harness.figures").Row, part("abort")
    rows = [
        row("abort", "case", "ours", [{"delivered_s": 1.5}]),
        row("abort", "case", abort.PLAIN, [{"slowest_s": 0.5}]),
    ]
    (verdict,) = abort.judge(rows)
    assert (verdict.value, verdict.limit, verdict.met) == (1.5, 1.5, True)


def test_tables_show_median_and_spread(part: Part) -> None:
    tables, column, spread = part("harness.tables"), part("harness.benchmark").Column, part("harness.figures").spread
    wide = column(name="wall_s", title="wall, s", digits=1, spread=True)
    assert tables.shown(spread([1.0, 2.0, 4.0]), wide) == "2.0 (1.0 4.0)"
    assert tables.shown(spread([2.0]), wide) == "2.0"
    found = tables.results_table(part("stress").BENCHMARK, rows_of(part, ours=[1.0], httpx=[20.0]))
    assert "20.00 x" in [cell for one in found.columns for cell in one.cells]


# --- answers, and what clients make of them ---


def test_an_answer_is_whole_and_bears_the_id(part: Part, shape: Any) -> None:
    body = json.loads(body_of(part("harness.answers").generate_answer(shape).small(RID.encode())))
    assert body["meta_info"]["id"] == RID
    assert len(body["output_ids"]) == len(body["meta_info"]["output_token_logprobs"]) == shape.tokens


def test_the_floor_and_the_other_clients_read_the_same_arrays(part: Part, shape: Any) -> None:
    body = body_of(part("harness.answers").generate_answer(shape).small(RID.encode()))
    floor = part("peers.raw_peer").decode(bytearray(body), RID, shape)
    plain = part("peers.base").read(json.loads(body), RID, shape)
    assert floor.experts.dtype == np.uint8
    assert plain.experts.shape == floor.experts.shape == (7, 2, 4)
    for one, other in zip(floor[2:], plain[2:], strict=True):
        assert np.array_equal(one, other)
    assert part("peers.base").fault(floor, shape, exact=True) == ""


def test_the_floor_refuses_experts_that_the_model_does_not_have(part: Part) -> None:
    for wrong in (-1, 128):
        with pytest.raises(ValueError, match="expert"):
            part("peers.raw_peer").narrow(np.array([0, wrong], np.int32).tobytes())


def test_no_client_may_cheat(part: Part, shape: Any) -> None:
    base, work = part("peers.base"), part("harness.work").Work
    answer = base.read(part("harness.answers").completion(shape, RID), RID, shape)
    task = work(peer="httpx", urls=["http://127.0.0.1:1"], threads=1, requests=1, shape=shape)
    base.check([answer], task, 1)
    for wrong, words in (
        (answer._replace(told="f" * 32), "bears the id"),
        (answer._replace(ids=answer.ids[:-1]), "4 ids, 5 logprobs"),
        (answer._replace(logprobs=answer.logprobs.astype(np.float64)), "logprobs float64"),
        (answer._replace(experts=answer.experts[:-1]), r"experts are \(6, 2, 4\)"),
        (answer._replace(experts=None), "no experts"),
    ):
        with pytest.raises(ValueError, match=words):
            base.check([wrong], task, 1)
    with pytest.raises(ValueError, match="1 answers to 2 requests"):
        base.check([answer], task, 2)


def test_work_travels_to_the_measured_process(part: Part, shape: Any) -> None:
    work = part("harness.work").Work
    task = work(peer="raw", urls=["http://127.0.0.1:1"], threads=2, requests=8, seconds=1.5, shape=shape, api_key="k")
    assert work.from_json(task.to_json()) == task
    assert task.headers["Authorization"] == "Bearer k"
    assert [len(prompt) for prompt in task.prompts(4)] == [3, 3, 3, 3]
    assert len({tuple(prompt) for prompt in task.prompts(64)}) == 64


# --- the load server ---


@pytest.mark.parametrize("space", ["", " "])
def test_the_server_finds_the_id_however_json_is_spaced(part: Part, space: str) -> None:
    body = json.dumps({"input_ids": [1], "rid": RID}, separators=(",", f":{space}")).encode()
    assert part("harness.load_server").rid_of(body) == RID.encode()


def test_the_server_wants_ids_of_one_length(part: Part) -> None:
    with pytest.raises(ValueError, match="32 characters"):
        part("harness.load_server").rid_of(b'{"rid":"short","input_ids":[1,2,3,4,5,6,7,8,9,10,11,12]}')


def test_the_length_is_read_in_any_case(part: Part) -> None:
    length = part("harness.load_server").content_length
    assert length(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 12") == 12
    assert length(b"POST / HTTP/1.1\r\ncontent-length:7\r\nHost: x") == 7
    assert length(b"GET / HTTP/1.1\r\nHost: x") == 0


@pytest.fixture
def url(part: Part, shape: Any) -> Iterator[str]:
    with part("harness.server_process").LoadServer(1, 0.0, shape) as urls:
        yield urls[0]


def test_the_server_answers_what_a_client_asks(url: str, part: Part, shape: Any) -> None:
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=10.0) as sock:
        ask = json.dumps({"rid": RID}).encode()
        request = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(ask), ask)
        sock.sendall(request[:30])
        sock.sendall(request[30:])
        answer = part("peers.raw_peer").decode(part("peers.raw_peer").receive(sock), RID, shape)
    assert part("peers.base").fault(answer, shape, exact=True) == ""
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10.0)
    statuses = {}
    for path in ("/v1/loads", "/server_info", "/model_info", "/health", "/nothing"):
        connection.request("GET", path)
        response = connection.getresponse()
        statuses[path] = response.status
        response.read()
    connection.close()
    assert statuses == {"/v1/loads": 200, "/server_info": 200, "/model_info": 200, "/health": 200, "/nothing": 404}
    control = part("harness.plain").Control(url)
    assert control.running() == (0, 0)
    control.close()


# --- the command line ---


def test_without_a_name_all_benchmarks_run_that_need_no_extra(part: Part) -> None:
    suite = part("suite")
    common, plans = suite.read(["--quick", "--repeat", "2", "--compare", "no", "--json", "x.json"])
    assert [benchmark.name for benchmark, _ in plans] == [name for name in suite.NAMES if name not in suite.APART]
    assert set(suite.APART) == {"collate", "scale"}
    assert (common.form.value, common.repeats, common.compare, common.json) == ("quick", 2, False, "x.json")


def test_one_benchmark_alone_takes_its_own_options(part: Part) -> None:
    line = ["stress", "--engines", "2", "--threads", "2048", "64", "--seconds", "20", "--engine-s", "0.5"]
    common, ((_, options),) = part("suite").read(line)
    assert (options.engines, options.threads, options.seconds, options.engine_s) == (2, (2048, 64), 20.0, (0.5,))
    cases = part("stress").make_cases(options, common)
    assert [(case.threads, case.engine_s, case.repeats) for case in cases] == [(2048, 0.5, 5), (64, 0.5, 5)]


def test_real_engines_get_ours_alone_unless_compared(part: Part) -> None:
    line = ["stress", "--url", "http://a:1", "--url", "http://b:2", "--threads", "8"]
    for more, peers in (([], ("ours",)), (["--compare", "yes"], part("stress")._DEFAULT)):
        common, ((_, options),) = part("suite").read([*line, *more])
        (case,) = part("stress").make_cases(options, common)
        assert (case.urls, case.peers, case.work("ours", list(case.urls)).checked) == (options.url, peers, False)


@pytest.mark.parametrize(
    "line", [["nothing"], ["stress", "--peers", "curl"], ["--repeat", "0"], ["--quick", "--smoke"]]
)
def test_what_does_not_exist_is_refused(part: Part, line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        part("suite").read(line)
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["full", "quick", "smoke"])
def test_every_benchmark_has_options_for_every_form(part: Part, form: str) -> None:
    suite, options = part("suite"), part("harness.options")
    for name in suite.NAMES:
        assert suite.load(name).name == name
        assert suite.load(name).defaults(options.Form(form))


def test_the_suite_needs_no_other_client_until_it_runs_one() -> None:
    code = """
import sys
from benchmarks import suite
[suite.load(name) for name in suite.NAMES]
print(sorted({"httpx", "aiohttp", "matplotlib"} & set(sys.modules)))
"""
    ended = run(code, timeout=60.0)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
