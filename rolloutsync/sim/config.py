"""How one simulated engine behaves: a frozen value, checked when it is made."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from rolloutsync.sim.tokenizer import MIN_VOCAB_SIZE
from rolloutsync.sim.tokens import DEFAULT_MEAN_OUTPUT_TOKENS, DEFAULT_VOCAB_SIZE

HOST = "127.0.0.1"
# What a setting is that was not given: the real engine's own default.
DEFAULTS: dict[str, dict[str, Any]] = {
    "sglang": {"version": "0.5.23", "load_publish_interval": 15, "report_interval": 50, "block_size": 1},
    "vllm": {"version": "0.33.0", "load_publish_interval": 1, "report_interval": 1, "block_size": 16},
}

_AT_LEAST_ONE = (
    "context_length",
    "max_running_requests",
    "max_total_tokens",
    "dp_size",
    "tp_size",
    "load_publish_interval",
    "report_interval",
    "chunked_prefill_size",
    "stream_interval",
    "backlog",
    "block_size",
)
_NOT_NEGATIVE = (
    "port",
    "dispatch_s",
    "load_lag_s",
    "death_delay_s",
    "update_s",
    "hidden_size",
)
_NOT_VLLM = ("max_queued_requests", "waiting_timeout_s", "running_timeout_s", "admin_api_key", "hidden_size")
_NONE_OR_POSITIVE = ("waiting_timeout_s", "running_timeout_s")
_POSITIVE = (
    "tokens_per_second",
    "prefill_tokens_per_second",
    "load_idle_interval_s",
    "pause_poll_s",
    "health_poll_s",
    "health_timeout_s",
    "disconnect_poll_s",
    "keep_alive_s",
)


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """Settings of one simulated engine; every duration is in seconds, every limit per data-parallel rank.

    The defaults are a real engine's where it has them. Raises `ValueError` or `TypeError` naming field and value.

    Attributes:
        port: 0 lets the system choose.
        dialect: "sglang" or "vllm": which engine's API it has.
        version: The version to answer as: SGLang 0.4.6 to 0.5.x, vLLM 0.13 to 0.33; empty is the newest one.
        model_path: What `/model_info` reports.
        vocab_size: Ids at and above it are out of vocabulary.
        context_length: Prompt and output together.
        max_running_requests: Decoded at the same time; the rest waits.
        max_queued_requests: Waiting above this many is answered with 503; None never (SGLang).
        max_total_tokens: Size of the KV cache; a full one retracts requests.
        block_size: Tokens per block of the prefix cache, which knows whole ones only; 0 is the engine's own.
        dp_size: Data-parallel ranks, each with its own queues and limits.
        tp_size: Reported in `/server_info`; nothing else depends on it.
        tokens_per_second: Decode speed of one running request.
        prefill_tokens_per_second: Speed at which a rank computes uncached prompt tokens.
        chunked_prefill_size: Prompt tokens per forward pass; an abort meets a prefill only between two passes.
        dispatch_s: From the front door to a rank's waiting queue.
        load_publish_interval: Decode steps between two load snapshots (SGLang 0.5.13 and later); 0 is the engine's own.
        load_idle_interval_s: The same while idle.
        load_lag_s: How much later a snapshot can be read.
        pause_poll_s: How often an aborting pause looks whether all is answered.
        health_poll_s: How often `/health` looks for its generated token.
        health_timeout_s: After which `/health` answers 503.
        disconnect_poll_s: How often a silent request's client is checked (SGLang; vLLM notices at once).
        report_interval: Every so many tokens a request reports to the front door, which then looks for its client, too;
            what was not reported is lost when a retracted request is aborted; 0 is the engine's own.
        keep_alive_s: An idle connection is closed after this.
        api_key: Needed for all but health endpoints, if given; with vLLM for those that generate.
        admin_api_key: Needed for control endpoints instead, if given (SGLang).
        routed_experts: `(layers, topk, num_experts)` switches routed experts on.
        hidden_size: Width of hidden states; 0 refuses requests for them (SGLang).
        die_on_bad_token: An id outside the vocabulary ends the process, as in real SGLang; so do an empty prompt in a
            batch and a `logprob_start_len` below -1. vLLM refuses it.
        death_delay_s: From the fatal request to the end of the process.
        weight_version: The version at start.
        mean_output_tokens: Mean sample length where the end token is not ignored.
        update_s: How long a weight update takes.
        drain_on_sigterm: SIGTERM lets running requests finish first, as in real SGLang; vLLM never does.
        random_when_unseeded: Requests without a seed differ from each other; False makes them use seed 0.
        stream_interval: Tokens per streamed chunk.
        backlog: Length of the listen queue.
        waiting_timeout_s: A request that waits longer is answered with 503 (SGLANG_REQ_WAITING_TIMEOUT); None never.
        running_timeout_s: A request that runs longer is answered with 503 (SGLANG_REQ_RUNNING_TIMEOUT); None never.
        enable_metrics: Whether there is `/metrics`, as with SGLang's flag of that name; vLLM always has it.
        dev_mode: vLLM's control plane (VLLM_SERVER_DEV_MODE=1); on, as an engine for rollouts is started.
        enable_scale_out: vLLM's `/inference` endpoints where the version wants a flag for them; on for the same reason.
        enable_prompt_tokens_details: vLLM tells how many prompt tokens it found in its cache.
        enable_server_load_tracking: vLLM counts requests in `/load`.
        enable_request_id_headers: vLLM answers with `X-Request-Id`.
    """

    port: int = 0
    dialect: str = "sglang"
    version: str = ""
    model_path: str = "sim-model"
    vocab_size: int = DEFAULT_VOCAB_SIZE
    context_length: int = 32768
    max_running_requests: int = 64
    max_queued_requests: int | None = None
    max_total_tokens: int = 1_048_576
    block_size: int = 0
    dp_size: int = 1
    tp_size: int = 1
    tokens_per_second: float = 200.0
    prefill_tokens_per_second: float = 20_000.0
    chunked_prefill_size: int = 256
    dispatch_s: float = 0.001
    load_publish_interval: int = 0
    load_idle_interval_s: float = 0.02
    load_lag_s: float = 0.0
    pause_poll_s: float = 1.0
    health_poll_s: float = 1.0
    health_timeout_s: float = 20.0
    disconnect_poll_s: float = 4.0
    report_interval: int = 0
    keep_alive_s: float = 5.0
    api_key: str | None = None
    admin_api_key: str | None = None
    routed_experts: tuple[int, int, int] | None = None
    hidden_size: int = 0
    die_on_bad_token: bool = True
    death_delay_s: float = 0.5
    weight_version: str = "default"
    mean_output_tokens: float = DEFAULT_MEAN_OUTPUT_TOKENS
    update_s: float = 0.01
    drain_on_sigterm: bool = True
    random_when_unseeded: bool = False
    stream_interval: int = 1
    backlog: int = 2048
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    enable_metrics: bool = False
    dev_mode: bool = True
    enable_scale_out: bool = True
    enable_prompt_tokens_details: bool = False
    enable_server_load_tracking: bool = False
    enable_request_id_headers: bool = False

    def __post_init__(self) -> None:
        self._require("dialect", self.dialect in DEFAULTS, "one of " + ", ".join(DEFAULTS))
        for name, value in DEFAULTS[self.dialect].items():
            if getattr(self, name) in ("", 0):
                object.__setattr__(self, name, value)
        if re.fullmatch(r"\d+\.\d+", self.version):
            object.__setattr__(self, "version", f"{self.version}.0")
        self._check_numbers(_AT_LEAST_ONE, lambda value: value >= 1, "at least 1")
        self._check_numbers(_NOT_NEGATIVE, lambda value: value >= 0, "at least 0")
        self._check_numbers(_POSITIVE, lambda value: value > 0, "above 0")
        self._require("port", self.port <= 65535, "at most 65535")
        self._require("vocab_size", MIN_VOCAB_SIZE <= self.vocab_size < 2**24, f"in [{MIN_VOCAB_SIZE}, 2**24)")
        self._require("mean_output_tokens", self.mean_output_tokens >= 1, "at least 1")
        queued = self.max_queued_requests
        self._require("max_queued_requests", queued is None or queued >= 0, "None or at least 0")
        self._require("version", _parse(self.version) is not None, "a version such as '0.5.23'")
        given = tuple(name for name in _NONE_OR_POSITIVE if getattr(self, name) is not None)
        self._check_numbers(given, lambda value: value > 0, "None or above 0")
        self._check_experts()
        for name in _NOT_VLLM if self.dialect == "vllm" else ():
            self._require(name, not getattr(self, name), "left out with dialect 'vllm'")

    def _check_numbers(self, names: tuple[str, ...], good: Any, wanted: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            self._require(name, good(value), wanted)

    def _check_experts(self) -> None:
        if self.routed_experts is None:
            return
        shape = tuple(self.routed_experts)
        good = len(shape) == 3 and all(size >= 1 for size in shape) and shape[1] <= shape[2]
        self._require("routed_experts", good, "(layers, topk, num_experts) with topk <= num_experts")
        object.__setattr__(self, "routed_experts", shape)

    def _require(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def host(self) -> str:
        """The only address that a simulated engine listens on."""
        return HOST

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, to be compared."""
        parsed = _parse(self.version)
        assert parsed is not None
        return parsed

    def to_json(self) -> str:
        """Returns the settings as JSON; `from_json` reads them back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, **more: Any) -> SimConfig:
        """Makes settings of JSON, and of further ones that win over it.

        Raises:
            ValueError: Not a JSON object, an unknown field, or a bad value.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"settings must be a JSON object, got {text!r}")
        values |= more
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown settings: {', '.join(unknown)}")
        return cls(**values)


def _parse(version: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else None
