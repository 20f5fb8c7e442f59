"""The vLLM dialect, 0.16 to 0.33: requests. Answers are read in ``vllm_answer`` and ``vllm_load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import orjson

from rolloutsync.dialects.base import JSON_OPTIONS, Call, Facts, LoadReading, error_text, get, post
from rolloutsync.dialects.common import Common
from rolloutsync.dialects.vllm_answer import decode
from rolloutsync.dialects.vllm_load import read_facts, read_metrics, read_server_load
from rolloutsync.dialects.vllm_request import COMPLETIONS, RANKS, TOKENS, body_of, routes
from rolloutsync.dialects.vllm_sampling import resumed_seed
from rolloutsync.dialects.vllm_weights import VLLMWeights
from rolloutsync.errors import shown
from rolloutsync.payload import BYTES, LargeField

if TYPE_CHECKING:
    from rolloutsync.sample import Prompt, Segment

PAUSE_MODES = {"abort": "abort", "wait": "wait", "keep": "keep", "in_place": "keep"}  # the last is SGLang's word
_RANK_HEADER = "X-data-parallel-rank"
_KEEP = "mode=keep&clear_cache=false"
_METRICS, _LOAD = "/metrics", "/load"
_DEV_SINCE = {  # paths that need the development mode, and the first version that has them
    **dict.fromkeys(("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"), "0.16"),
    **dict.fromkeys(("/reset_prefix_cache", "/collective_rpc", "/server_info", "/update_weights"), "0.16"),
    **dict.fromkeys(("/init_weight_transfer_engine", "/get_world_size"), "0.16"),
    **dict.fromkeys(("/start_weight_update", "/finish_weight_update"), "0.21"),
    "/abort_requests": "0.26",
    **dict.fromkeys(("/update_weight_version", "/weight_info"), "0.27"),
    "/release_kv_cache_memory": "0.31",
    **dict.fromkeys(("/weight_checker", "/shutdown_weight_transfer_engine"), "0.32"),
}
_FLAGS = {  # in an error's words: what to start the server with
    "sleep mode": "--enable-sleep-mode",
    "weight transfer not configured": '--weight-transfer-config \'{"backend": "nccl"}\'',
    "weight_transfer_config": '--weight-transfer-config \'{"backend": "nccl"}\'',
}
_LARGE = (LargeField(("choices", 0, "routed_experts"), BYTES),)
_WEIGHTS, _CACHE, _GRAPHS = "weights", "kv_cache", "cuda_graph"


class VLLMDialect(Common):
    """vLLM over HTTP. Stateless. Sampling parameters are kept in the one vocabulary, and translated when sent."""

    name = "vllm"
    flush = post("/reset_prefix_cache")
    ends_on_disconnect = True
    load_lags = True
    census: Call | None = post("/abort_requests", {})
    health: Call | None = get("/health")
    pause_after_memory: Call | None = post(f"/pause?{_KEEP}")
    asks_paused: Call | None = get("/is_paused")
    weights = VLLMWeights()

    def resumed_seed(self, seed: int, done: int) -> int:
        """See ``Dialect.resumed_seed``."""
        return resumed_seed(seed, done)

    # --- generate ---

    def generate_routes(self, prompt: Prompt, facts: Facts) -> tuple[str, ...]:
        """See ``Dialect.generate_routes``."""
        return routes(prompt, facts)

    def encode_generate(
        self, prompt: Prompt, rid: str, *, facts: Facts, dp_rank: int | None, route: str | None = None
    ) -> Call:
        """See ``Dialect.encode_generate``."""
        path = route or routes(prompt, facts)[0]
        body = body_of(prompt, rid, facts, path, self.default_max_new_tokens)
        chosen = (prompt.fields[name] for name in RANKS if prompt.fields.get(name) is not None)
        dp_rank = next(chosen, dp_rank)
        headers = () if dp_rank is None else ((_RANK_HEADER, str(dp_rank)),)
        return Call(method="POST", path=path, body=orjson.dumps(body, option=JSON_OPTIONS), headers=headers)

    def large_fields(self, prompt: Prompt, facts: Facts, dtype: str) -> tuple[LargeField, ...]:  # noqa: ARG002
        """See ``Dialect.large_fields``. A server that was started to return experts does so whether asked or not."""
        return _LARGE

    def decode_generate(self, answer: Any, prompt: Prompt, rid: str, facts: Facts, dtype: str) -> Segment:
        """See ``Dialect.decode_generate``. The answer's form tells its route."""
        return decode(answer, prompt, rid, facts, dtype)

    def lacks(self, call: Call, status: int, words: str) -> bool:
        """See ``Dialect.lacks``. A 404 may also be about the model that was asked for."""
        told = words.lower()
        if status in {404, 405, 501}:
            return not (call.path in {TOKENS, COMPLETIONS} and "model" in told and "does not exist" in told)
        return (status == 403 and "scale-out" in told) or (status == 400 and "missing 'request_ids'" in told)

    def hint(self, call: Call, status: int, words: str) -> str:
        """See ``Dialect.hint``."""
        path = call.path.partition("?")[0]
        if status in {404, 405} and path in _DEV_SINCE:
            return f"vLLM has {path} from {_DEV_SINCE[path]} on, if it is started with VLLM_SERVER_DEV_MODE=1"
        flag = next((flag for told, flag in _FLAGS.items() if told in words.lower()), None)
        return "" if flag is None else f"start the server with {flag}"

    # --- abort and load ---

    def abort(self, rid: str | None) -> Call:
        """See ``Dialect.abort``. The ids are those of the engine, by whichever route the request came."""
        return post("/abort_requests", {} if rid is None else {"request_ids": _ids(rid)})

    def abort_ways(self, rid: str | None) -> tuple[tuple[Call, ...], ...]:
        """See ``Dialect.abort_ways``. Before 0.26 a pause can end them all; scale-out servers abort by id."""
        if rid is not None:
            return (self.abort(rid),), (post("/inference/v1/abort_requests", {"request_ids": _ids(rid)}, admin=False),)
        return (self.abort(None),), (self.pause("abort"), self.resume())

    def read_census(self, answer: Any) -> int | None:
        """See ``Dialect.read_census``. Samples and prompts with several of them are counted both."""
        told = answer.get("aborted") if isinstance(answer, dict) else None
        return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else None

    def load_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.load_calls``."""
        return (get(_METRICS),)

    def work_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.work_calls``. A request that has just come is counted there before it is scheduled."""
        return (get(_LOAD),)

    def read_load(self, call: Call, answer: Any, dp_size: int) -> LoadReading:
        """See ``Dialect.read_load``."""
        return read_server_load(answer) if call.path == _LOAD else read_metrics(answer, dp_size)

    # --- facts ---

    def facts_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.facts_calls``."""
        return get("/server_info?config_format=json"), get("/v1/models")

    def more_facts_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.more_facts_calls``. What a server is configured to be does not say its version."""
        return (get("/version"),)

    def read_facts(self, answer: Any) -> Facts:
        """See ``Dialect.read_facts``."""
        return read_facts(answer)

    def scheduler_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.scheduler_calls``. ``/health`` is a flag, and stays well when the engine is frozen."""
        return (get("/is_sleeping"),)

    def barrier(self, rid: str) -> Call | None:
        """See ``Dialect.barrier``. Completions are there however the server was started."""
        return post(COMPLETIONS, {"prompt": [0], "max_tokens": 1, "request_id": rid}, admin=False)

    def reach_call(self) -> Call:
        """See ``Dialect.reach_call``."""
        return get("/version")

    def version_call(self) -> Call:
        """See ``Dialect.version_call``."""
        return get("/weight_info")

    def read_version(self, answer: Any) -> str | None:
        """See ``Dialect.read_version``."""
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    # --- pause and memory ---

    def pause(self, mode: str) -> Call:
        """See ``Dialect.pause``. "wait" is answered when the last request has ended. The cache is left alone."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode must be one of {tuple(PAUSE_MODES)}, got {shown(mode)}")
        query = urlencode({"mode": PAUSE_MODES[mode], "clear_cache": "false"})
        return post(f"/pause?{query}", long=mode == "wait")

    def resume(self) -> Call:
        """See ``Dialect.resume``."""
        return post("/resume")

    def release_memory(self, tags: list[str] | None) -> Call:
        """See ``Dialect.release_memory``. Weights go to the host's memory and come back; they go with the cache only.

        Raises:
            ValueError: vLLM cannot release these tags without others.
        """
        chosen = _check_tags(tags)
        if chosen == {_CACHE}:
            return post("/release_kv_cache_memory", long=True)
        if chosen != {_WEIGHTS, _CACHE}:
            raise ValueError(f"vLLM releases {[_CACHE]} or {[_CACHE, _WEIGHTS]}, not {sorted(chosen)}")
        return post("/sleep?level=1", long=True)

    def resume_memory(self, tags: list[str] | None) -> Call:
        """See ``Dialect.resume_memory``."""
        chosen = _check_tags(tags)
        everything = chosen == {_WEIGHTS, _CACHE}
        query = "" if everything else "?" + urlencode([("tags", tag) for tag in sorted(chosen)])
        return post(f"/wake_up{query}", long=True)

    def says_paused(self, status: int, body: bytes | bytearray) -> bool:
        """See ``Dialect.says_paused``. Up to 0.31, and in mode "keep", requests wait instead."""
        return status == 503 and "paused" in error_text(body).lower()


def _ids(rid: str) -> list[str]:
    """The names that the engine may know a request by: of the token route, and of a completion's only prompt."""
    return [f"generate-tokens-{rid}", f"cmpl-{rid}-0"]


def _check_tags(tags: list[str] | None) -> set[str]:
    """Tags as vLLM knows them; None is all. CUDA graphs are no memory of their own there, and go along with others."""
    chosen = {_WEIGHTS, _CACHE} if tags is None else set(tags)
    unknown = chosen - {_WEIGHTS, _CACHE, _GRAPHS}
    if unknown or chosen == {_GRAPHS}:
        raise ValueError(f"vLLM has no memory tag {sorted(unknown or chosen)[0]!r}, only {[_CACHE, _WEIGHTS]}")
    return chosen - {_GRAPHS}
