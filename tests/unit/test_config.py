"""Settings: bad values are refused when they are made, by field and value; one engine has one URL."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from rolloutsync.config import ClientConfig, RetryPolicy, Timeouts, check_count, check_number, parse_url

_NOT_NUMBERS = ["1", None, True, [1]]
_NOT_FINITE = [float("nan"), float("inf"), -0.5]


def _refusal(kind: type, field: str, value: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(**{field: value})
    assert type(caught.value) in {TypeError, ValueError}
    return str(caught.value)


@pytest.mark.parametrize("value", [*_NOT_NUMBERS, *_NOT_FINITE, 0])
@pytest.mark.parametrize("field", [field.name for field in fields(Timeouts)])
def test_timeouts_are_positive_numbers(field: str, value: Any) -> None:
    """Zero would mean to give up at once, infinity to hang."""
    assert f"Timeouts.{field} must be" in (words := _refusal(Timeouts, field, value))
    assert repr(value) in words


@pytest.mark.parametrize("value", [*_NOT_NUMBERS, *_NOT_FINITE])
@pytest.mark.parametrize("field", [field.name for field in fields(RetryPolicy)])
def test_retry_policies_are_checked(field: str, value: Any) -> None:
    """Each field, each kind of nonsense."""
    assert f"RetryPolicy.{field} must be" in (words := _refusal(RetryPolicy, field, value))
    assert repr(value) in words


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", 2.5),
        ("orphan_abort_timeout_s", 0),
    ],
)
def test_limits_of_a_retry_policy(field: str, value: Any) -> None:
    """At least one attempt, a whole number; an abort needs some time."""
    assert repr(value) in _refusal(RetryPolicy, field, value)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("engine_concurrency", 0, "0"),
        ("engine_concurrency", 1.5, "1.5"),
        ("engine_concurrency", True, "True"),
        ("body_budget_bytes", 0, "0"),
        ("body_budget_bytes", "2G", "'2G'"),
        ("retry", 3, "3"),
        ("timeouts", 10.0, "10.0"),
        ("routed_experts_dtype", "int8", "'int8'"),
        ("routed_experts_shape", 4, "4"),
        ("routed_experts_shape", (4,), "(4,)"),
        ("routed_experts_shape", (4, 0), "0"),
        ("routed_experts_shape", (4, 2.0), "2.0"),
    ],
)
def test_client_settings_are_checked(field: str, value: Any, shown: str) -> None:
    """The message names the argument and what was given."""
    words = _refusal(ClientConfig, field, value)
    assert field in words
    assert shown in words


@pytest.mark.parametrize("key", ["", " k", "k\n", "clé", 7, b"k", "a\tb"])
@pytest.mark.parametrize("field", ["api_key", "admin_api_key"])
def test_keys_are_checked_but_never_shown(field: str, key: Any) -> None:
    """A key that would break the header is refused; its value stays secret."""
    words = _refusal(ClientConfig, field, key)
    assert field in words
    assert not (key and repr(key) in words)


def test_settings_are_frozen_keyword_only_and_travel() -> None:
    """They are values."""
    config = ClientConfig(engine_concurrency=7, retry=RetryPolicy(max_attempts=2), routed_experts_shape=(4, 2))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.retry = RetryPolicy()  # type: ignore[misc]
    with pytest.raises(TypeError):
        Timeouts(1.0)  # type: ignore[call-arg]
    assert not hasattr(config, "__dict__")


@pytest.mark.parametrize(("value", "least", "fine"), [(0, 0, True), (3, 0, True), (-1, 0, False), (10**400, 0, True)])
def test_counts(value: int, least: int, fine: bool) -> None:
    """Integers of any size."""
    if fine:
        check_count("n", value, least=least)
    else:
        with pytest.raises(ValueError, match=r"n must be at least 0, got -1"):
            check_count("n", value, least=least)


def test_numbers_that_no_float_can_hold() -> None:
    """An integer beyond the floats is no number of seconds."""
    with pytest.raises(ValueError, match="timeout must be"):
        check_number("timeout", 10**400)


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://h:30000", "http://h:30000"),
        ("http://h:30000/", "http://h:30000"),
        ("http://h:30000///", "http://h:30000"),
        ("http://h:30000/prefix/", "http://h:30000/prefix"),
        ("http://h/a/b", "http://h/a/b"),
        ("https://h:8443/p", "https://h:8443/p"),
        ("HTTP://Host.Example:1", "http://host.example:1"),
        ("http://h:80", "http://h"),
        ("https://h:443/", "https://h"),
        ("https://h:80", "https://h:80"),
        ("http://h:", "http://h"),
        ("http://[::1]:30000/", "http://[::1]:30000"),
        ("http://[FE80::1]", "http://[fe80::1]"),
        ("http://127.0.0.1:1/V1", "http://127.0.0.1:1/V1"),
        ("http://under_score:1", "http://under_score:1"),
    ],
)
def test_good_urls_have_one_form(given: str, normal: str) -> None:
    """Only what names the same engine is made the same; parsing again changes nothing."""
    assert parse_url(given) == normal
    assert parse_url(normal) == normal


@pytest.mark.parametrize(
    "url",
    [
        "h:30000",
        "h",
        "localhost:30000/x",
        "//h:1",
        "ftp://h",
        "",
        "http://",
        "http:///x",
        "http://:80",
        "http://user@h:1",
        "http://user:pw@h:1",
        "http://127.0.0.1:30000@0",
        "http://@h",
        "http://::1:30000",
        "http://2001:db8::1:9",
        "http://[::1:9",
        "http://h:99999",
        "http://h:-1",
        "http://h:abc",
        "http://h:0",
        "http://h:1/?a=b",
        "http://h:1/?",
        "http://h:1/#x",
        "http://h :1",
        " http://h:1",
        "http://h:1 ",
        "http://h:1/a b",
        "http://h\n:1",
        "http://h:1/\x00",
        'http://h:1/"',
        "http://h\\x",
    ],
)
def test_bad_urls_are_refused_by_name(url: str) -> None:
    """Nothing is dialled that was not meant."""
    with pytest.raises(ValueError, match="engine URL") as caught:
        parse_url(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("url", ["http://::1:30000", "http://2001:db8::1:9"])
def test_a_bare_ipv6_address_is_explained(url: str) -> None:
    """The brackets are easily forgotten."""
    with pytest.raises(ValueError, match=r"brackets"):
        parse_url(url)


@pytest.mark.parametrize("url", [None, 5, b"http://h", ["http://h"]])
def test_urls_are_strings(url: Any) -> None:
    """And nothing else."""
    with pytest.raises(TypeError, match="engine URL must be a string"):
        parse_url(url)
