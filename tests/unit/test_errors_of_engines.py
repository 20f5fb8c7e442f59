"""The engine's own words, from every shape of error answer that was seen."""

from __future__ import annotations

import pytest

from rolloutsync.dialects.base import error_text, version_tuple
from rolloutsync.dialects.sglang import SGLangDialect

from .golden import all_recorded, recorded

_SAID = {
    ("0.5.23", "error_queue_full"): "The request queue is full.",
    ("0.5.23", "error_duplicate_rid"): "Duplicate request ID detected: dup",
    ("0.5.23", "error_sampling_key"): "unknown field `nonsense`, expected one of `max_new_tokens`,",
    ("0.5.23", "error_empty_ids"): "input_ids cannot be empty.",
    ("0.5.23", "error_too_long"): "Requested token count exceeds the model's maximum context length of 2048 tokens.",
    ("0.5.23", "error_not_json"): "1 validation error: {'type': 'json_invalid'",
    ("0.5.23", "error_hidden_states"): "The server is not configured to return hidden states.",
    ("0.5.23", "error_flush_busy"): "Flush cache failed.",
    ("0.5.23", "get_load_gone"): "Not Found",
    ("0.5.9", "error_sampling_key"): "Internal Server Error",
    ("0.5.9", "error_continue_without_body"): "1 validation error: {'type': 'missing'",
    ("0.5.9", "not_found"): "Not Found",
}


@pytest.mark.parametrize(("version", "name"), _SAID)
def test_recorded_errors(version: str, name: str) -> None:
    """What a person would read, on one line, not too long."""
    exchange = recorded(name, version)
    assert exchange.status >= 400
    said = error_text(exchange.body)
    assert said.startswith(_SAID[version, name])
    assert "\n" not in said
    assert len(said) < 700


def test_every_recorded_error_is_in_the_table() -> None:
    """A shape that is recorded is tested."""
    errors = {key for key in all_recorded() if recorded(key[1], key[0]).status >= 400}
    assert errors - {("0.5.23", "weight_version_gone")} == set(_SAID)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "(empty answer)"),
        (b"  \n ", "(empty answer)"),
        (b'""', "(empty answer)"),
        (b"payload reached size limit", "payload reached size limit"),
        (b"<html>\n <b>502</b>\n</html>", "<html> <b>502</b> </html>"),
        (b'{"error":{"message":"x"}}', "x"),
        (b'{"error":"x"}', "x"),
        (b'{"object":"error","message":"x","code":400}', "x"),
        (b'{"detail":"x"}', "x"),
        (b'{"detail":[{"loc":["body"],"msg":"x"}]}', "[{'loc': ['body'], 'msg': 'x'}]"),
        (b'{"error":{"type":"Service Unavailable","code":"no_available_workers","message":"none"}}', "none"),
        (b'{"error":{}}', "{'error': {}}"),
        (b'{"success":false,"message":"m"}', "m"),
        (b"null", "None"),
        (b"[1]", "[1]"),
        (b"\xff\xfe\x80", "\ufffd\ufffd\ufffd"),
        (rb'{"error":"\ud83d"}', "\ufffd"),
    ],
)
def test_shapes_of_errors(body: bytes, said: str) -> None:
    """Dict, string, object, detail, plain text, HTML, nothing."""
    assert error_text(body) == said


def test_deep_and_long_errors_stay_short() -> None:
    """Whatever an engine sends."""
    assert len(error_text(b'{"error":' * 900 + b'"x"' + b"}" * 900)) < 700
    assert len(error_text(b"x" * 1_000_000)) < 700


@pytest.mark.parametrize(
    ("status", "body", "paused"),
    [
        (503, b'{"error":{"code":"paused","retryable":true}}', True),
        (503, b'{"object":"error","message":"Generation is paused","code":503}', True),
        (503, b"Paused", True),
        (503, b'{"object":"error","message":"The request queue is full.","code":503}', False),
        (503, b"", False),
        (500, b"paused", False),
        (400, b'{"error":"paused"}', False),
    ],
)
def test_a_pause_is_told_from_trouble(status: int, body: bytes, paused: bool) -> None:
    """Only a 503 that says so."""
    assert SGLangDialect().says_paused(status, body) is paused


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, ()),
        ("", ()),
        ("dev", ()),
        ("0.5.23", (0, 5, 23)),
        ("0.5.10.post2", (0, 5, 10)),
        ("0.5.10rc1", (0, 5, 10)),
        ("0.5.11.dev3+gabc", (0, 5, 11)),
        ("0.5", (0, 5)),
        ("1.x.2", (1,)),
    ],
)
def test_versions_compare_as_numbers(text: str | None, numbers: tuple[int, ...]) -> None:
    """Unknown sorts before all."""
    assert version_tuple(text) == numbers
