"""What the differential test against real SGLang found, kept here without a real engine."""

from __future__ import annotations

from typing import Any

import pytest

from .kit import Caller

PROMPT = [5, 6, 7]
EVERY_ID = list(range(512))


def fill(caller: Caller, count: int) -> list[Any]:
    """Starts long requests `r0`, `r1`, ..., of which four run and the others wait, and returns the calls."""
    calls = []
    for number in range(count):
        calls.append(caller.begin_generate([10 + number, 5, 6], 1900, rid=f"r{number}"))
        caller.await_row(f"r{number}", "running" if number < 4 else "waiting")
    caller.await_state(lambda state: state["waiting"] == max(0, count - 4), "all have arrived in the queue")
    return calls


def test_ignore_eos_ignores_stop_ids_too(main: Caller) -> None:
    """Real SGLang looks at no token then; without it the first token that may stop does."""
    stops = {"stop_token_ids": EVERY_ID}
    assert main.generate(PROMPT, 4, sampling=stops).finish == {"type": "length", "length": 4}
    stopped = main.generate(PROMPT, 9, sampling={**stops, "ignore_eos": False, "min_new_tokens": 4})
    assert (stopped.finish["type"], len(stopped.ids)) == ("stop", 5)


def test_ids_win_over_a_text(main: Caller) -> None:
    """Both may be given."""
    assert main.generate(PROMPT, 1, text="hello there").json["meta_info"]["prompt_tokens"] == len(PROMPT)


def test_every_sample_of_a_prompt_finds_it_in_the_cache(main: Caller) -> None:
    """With `n` above 1 the prompt is computed once first; that is no generation of the caller's."""
    main.post("/flush_cache")
    started = main.engine.state()["started"]
    answers = main.generate(PROMPT, 2, sampling={"n": 2}).json
    assert [each["meta_info"]["cached_tokens"] for each in answers] == [2, 2]
    assert main.engine.state()["started"] == started + 2


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPT, "sampling_params": {"n": None}},
        {"input_ids": PROMPT, "sampling_params": [{}]},
        {"input_ids": PROMPT, "rid": ["x"]},
        {"input_ids": [PROMPT, PROMPT], "sampling_params": [{}]},
        {"input_ids": [PROMPT, PROMPT], "sampling_params": []},
    ],
)
def test_what_the_engine_stumbles_over_is_a_500(main: Caller, body: dict[str, Any]) -> None:
    """As an uncaught exception is answered."""
    reply = main.post("/generate", body)
    assert (reply.status, reply.text) == (500, "Internal Server Error")


def test_a_last_event_does_not_say_when_it_was_sent(main: Caller) -> None:
    """Unlike an answer that is no stream."""
    assert "response_sent_to_client_ts" in main.generate(PROMPT, 1).json["meta_info"]
    assert "response_sent_to_client_ts" not in main.generate(PROMPT, 1, stream=True).text


def test_an_abort_in_the_queue_has_top_lists_where_they_were_asked_for(main: Caller) -> None:
    """They hold nothing, but are there."""
    calls = fill(main, 4)
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    queued = main.begin_generate(PROMPT, 5, rid="queued", **asked)
    main.await_row("queued", "waiting")
    main.post("/abort_request", {"rid": "queued"})
    meta = queued.result().json["meta_info"]
    assert (meta["input_top_logprobs"], meta["output_top_logprobs"]) == ([], [])
    main.post("/abort_request", {"abort_all": True})
    assert {call.result().finish["type"] for call in calls} == {"abort"}


def test_a_retracted_request_queues_behind_the_waiting_ones(main: Caller) -> None:
    """After the pause the one that had waited runs, and the last of the retracted waits."""
    calls = fill(main, 5)
    main.post("/pause_generation", {"mode": "retract"})
    main.post("/continue_generation", {})
    main.await_row("r4", "running")
    main.await_row("r3", "waiting")
    main.post("/abort_request", {"abort_all": True})
    assert [call.result().finish["message"] for call in calls] == [
        *["Aborted"] * 3,
        "Abort in waiting queue",
        "Aborted",
    ]


def test_an_abort_under_one_pause_is_answered_by_a_retract_pause(main: Caller) -> None:
    """The step under way ends it: aborted as a running one, and never retracted."""
    call = fill(main, 1)[0]
    main.post("/pause_generation", {"mode": "in_place"})
    main.post("/abort_request", {"rid": "r0"})
    main.post("/pause_generation", {"mode": "retract"})
    reply = call.result()
    assert (reply.finish["message"], reply.json["meta_info"]["num_retractions"]) == ("Aborted", 0)


def test_a_patient_flush_wants_an_engine_without_retracted_requests(main: Caller) -> None:
    """Without `timeout` a retract pause is enough."""
    fill(main, 1)
    main.post("/pause_generation", {"mode": "retract"})
    assert main.post("/flush_cache?timeout=0.01").status == 400
    assert main.post("/flush_cache").status == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/flush_cache?timeout=-1", None),
        ("GET", "/v1/loads?dp_rank=x", None),
        ("POST", "/abort_request", {"abort_all": "perhaps"}),
    ],
)
def test_values_of_control_calls_are_checked(main: Caller, method: str, path: str, body: Any) -> None:
    """A 400 in the form of a wrong shape."""
    reply = main.call(method, path, body)
    assert (reply.status, reply.json["type"]) == (400, "Bad Request")


def test_the_root_says_that_it_runs(main: Caller) -> None:
    """A JSON string."""
    assert main.get("/").json == "SGLang is running"
