"""Settings: frozen values, checked when made, with the unit in the name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from rolloutsync.errors import shown

GIB = 1 << 30
_MOST = 1e9  # seconds, 31 years; sockets and locks refuse much longer waits
_DEFAULT_PORTS = {"http": 80, "https": 443}


def _require(ok: bool, field: str, value: Any, rule: str) -> None:
    if not ok:
        raise ValueError(f"{field} must be {rule}, got {shown(value)}")


def check_number(field: str, value: Any, *, least: float = 0.0, open_end: bool = False) -> None:
    """Raise unless ``value`` is a number of at least (``open_end``: above) ``least`` that a wait can take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field} must be a number, got {shown(value)}")
    rule = f"a finite number {'above' if open_end else 'of at least'} {least:g} and at most {_MOST:g}"
    _require((value > least if open_end else value >= least) and value <= _MOST, field, value, rule)


def check_count(field: str, value: Any, *, least: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field} must be an integer, got {shown(value)}")
    _require(value >= least, field, value, f"at least {least}")


def check_bool(field: str, value: Any) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{field} must be True or False, got {shown(value)}")


def check_switch(field: str, value: Any) -> None:
    """Raise unless ``value`` is True, False or None."""
    if value not in (True, False, None) or isinstance(value, (int, float)) != isinstance(value, bool):
        raise TypeError(f"{field} must be True, False or None, got {shown(value)}")


def check_has(field: str, value: Any, method: str) -> None:
    """Raise unless ``value`` is None or has ``method``."""
    if value is not None and not callable(getattr(value, method, None)):
        raise TypeError(f"{field} must be an object with a method {method}(), got {shown(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how patiently a sample is tried again. What may be retried at all is in ``rolloutsync.retry``.

    Args:
        max_attempts: Requests sent for one sample at most. Refused connects, waits for an engine and pauses use none.
        backoff_base_s: First backoff, in seconds; it doubles with each attempt. The real one is drawn
            evenly between a quarter of it and all of it, so that a second wave is spread.
        backoff_cap_s: Longest backoff, in seconds.
        retry_after_cap_s: A ``Retry-After`` header is obeyed up to this many seconds.
        orphan_abort_timeout_s: How long the abort of a broken request may take before the sample moves on.
    """

    max_attempts: int = 5
    backoff_base_s: float = 1.0
    backoff_cap_s: float = 15.0
    retry_after_cap_s: float = 60.0
    orphan_abort_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_count("RetryPolicy.max_attempts", self.max_attempts)
        for name in ("backoff_base_s", "backoff_cap_s", "retry_after_cap_s"):
            check_number(f"RetryPolicy.{name}", getattr(self, name))
        check_number("RetryPolicy.orphan_abort_timeout_s", self.orphan_abort_timeout_s, open_end=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long things may take, in seconds.

    Args:
        connect_s: Name look-up and TCP connect.
        control_s: One control call (loads, abort, pause, flush, ...).
        long_control_s: Weight and memory calls, which are never re-sent.
        sample_s: One sample, from its first request to its result, retries included; pauses do not count.
        engine_wait_s: How long samples wait while no engine at all is live.
        idle_socket_s: Our sockets live this long idle; keep it below the server's keep-alive (both engines: 5 s).
        dead_s: An engine on which samples wait and that has not answered its probes for this long is dead.
        half_open_s: A peer that acknowledges nothing for this long is dead (TCP keep-alive, TCP_USER_TIMEOUT).
    """

    connect_s: float = 10.0
    control_s: float = 10.0
    long_control_s: float = 1800.0
    sample_s: float = 3600.0
    engine_wait_s: float = 60.0
    idle_socket_s: float = 2.0
    dead_s: float = 30.0
    half_open_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(f"Timeouts.{field.name}", getattr(self, field.name), open_end=True)


def parse_url(url: Any) -> str:
    """An engine's base URL in its one normal form: no trailing slash, no default port, lower-case host.

    Raises:
        TypeError: Not a string.
        ValueError: Not ``http(s)://host[:port][/prefix]``; user info, query and fragment are refused.
    """
    if not isinstance(url, str):
        raise TypeError(f"engine URL must be a string, got {shown(url)}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        hint = "; write an IPv6 address in brackets, http://[::1]:30000" if url.count(":") > 2 else ""
        raise ValueError(f"engine URL {shown(url)} is malformed: {error}{hint}") from None
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"engine URL {shown(url)} must start with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError(f"engine URL {shown(url)} has user info (the part before '@'); pass api_key= instead")
    _check_plain(url, parts.hostname, port)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    tail = "" if port in {None, _DEFAULT_PORTS[parts.scheme]} else f":{port}"
    return f"{parts.scheme}://{host}{tail}{parts.path.rstrip('/')}"


def _check_plain(url: str, host: str | None, port: int | None) -> None:
    if not host or port == 0 or any(char.isspace() or not char.isprintable() or char in '\\<>"' for char in url):
        raise ValueError(
            f"engine URL {shown(url)} is malformed: it needs a host, a port above 0, no spaces and no quotes"
        )
    if "?" in url or "#" in url:
        raise ValueError(f"engine URL {shown(url)} must have no query and no fragment")


def parse_urls(urls: Any) -> list[str]:
    """One URL or several, each in its normal form, duplicates dropped; errors as for ``parse_url``."""
    if isinstance(urls, str):
        urls = [urls]
    try:
        found = [parse_url(url) for url in urls]
    except TypeError as error:
        raise TypeError(f"urls must be a URL or a sequence of URLs: {error}") from None
    if not found:
        raise ValueError(f"urls is empty: {shown(urls)}")
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """All settings of a ``RolloutClient``, as they travel in a pickle; see there for the meaning of each."""

    dialect: str = "auto"
    engine_concurrency: int | None = None
    retry: RetryPolicy = RetryPolicy()
    timeouts: Timeouts = Timeouts()
    body_budget_bytes: int = 2 * GIB
    api_key: str | None = None
    admin_api_key: str | None = None
    routed_experts_shape: tuple[int, int] | None = None
    routed_experts_dtype: str = "auto"
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.engine_concurrency is not None:
            check_count("engine_concurrency", self.engine_concurrency)
        check_count("body_budget_bytes", self.body_budget_bytes)
        check_switch("progress", self.progress)
        for name, kind in (("retry", RetryPolicy), ("timeouts", Timeouts)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {shown(getattr(self, name))}")
        for name in ("api_key", "admin_api_key"):
            _check_key(name, getattr(self, name))
        self._check_experts()

    def _check_experts(self) -> None:
        dtypes = ("auto", "uint8", "uint16", "int32")
        _require(self.routed_experts_dtype in dtypes, "routed_experts_dtype", self.routed_experts_dtype, f"of {dtypes}")
        shape = self.routed_experts_shape
        if shape is None:
            return
        _require(isinstance(shape, tuple) and len(shape) == 2, "routed_experts_shape", shape, "(layers, topk)")
        for size in shape:
            check_count("routed_experts_shape", size)


def _check_key(name: str, key: Any) -> None:
    if key is None:
        return
    if not isinstance(key, str):
        raise TypeError(f"{name} must be a string, got a {type(key).__name__}")
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ValueError(f"{name} must be printable ASCII without surrounding spaces (its value is not shown)")
