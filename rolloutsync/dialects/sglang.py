"""The SGLang dialect, 0.5.6 to 0.5.23: requests. Answers are read in ``sglang_answer`` and ``sglang_load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.dialects import sampling as rules
from rolloutsync.dialects.base import Call, Facts, LoadReading, error_text, get, post, version_tuple
from rolloutsync.dialects.sglang_answer import decode
from rolloutsync.dialects.sglang_load import read_facts, read_loads
from rolloutsync.dialects.sglang_weights import SGLangWeights
from rolloutsync.errors import shown
from rolloutsync.payload import ROWS, LargeField, narrowest

if TYPE_CHECKING:
    from rolloutsync.payload import Body
    from rolloutsync.sample import Prompt, Segment

SAMPLING_RULES: dict[str, rules.Rule] = {
    "max_new_tokens": rules.COUNT,
    "min_new_tokens": rules.COUNT,
    "temperature": rules.NOT_NEGATIVE,
    "top_p": rules.SHARE,
    "top_k": rules.TOP_K,
    "min_p": rules.SHARE_OR_ZERO,
    "frequency_penalty": rules.FINITE,
    "presence_penalty": rules.FINITE,
    "repetition_penalty": rules.POSITIVE,
    "stop": rules.STOP,
    "stop_token_ids": rules.IDS,
    "stop_regex": rules.STOP,
    "sampling_seed": rules.INTEGER,
    "ignore_eos": rules.FLAG,
    "skip_special_tokens": rules.FLAG,
    "spaces_between_special_tokens": rules.FLAG,
    "no_stop_trim": rules.FLAG,
    "stream_interval": rules.COUNT,
    "logit_bias": rules.JSON,
    "custom_params": rules.JSON,
    "json_schema": rules.JSON,
    "regex": rules.JSON,
    "ebnf": rules.JSON,
    "structural_tag": rules.JSON,
    "beam_width": rules.COUNT,
    "watermark": rules.JSON,
    "choice": rules.JSON,
}
_OTHER_NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
_INDEXER = LargeField(("meta_info", "indexer_topk"), "int32")
_LOGPROBS = LargeField(("meta_info", "output_token_logprobs"), ROWS)
_KNOWN = (*SAMPLING_RULES, *_OTHER_NAMES, "n")
PAUSE_MODES = ("abort", "in_place", "retract")
_RANK_FIELD_SINCE = (0, 5, 10)  # routed_dp_rank; before it only data_parallel_rank is read
_ROWS_CUT_SINCE = (0, 5, 12)  # routed_experts_start_len; before it the field is ignored


class SGLangDialect:
    """SGLang over HTTP. Stateless."""

    name = "sglang"
    ends_on_disconnect = False  # noticed after one to three seconds
    load_lags = False  # it has timestamps, or is made for the call
    census: Call | None = None  # some versions die of an abort while idle
    health: Call | None = None  # it generates a token, which a busy engine may not get done in time
    pause_after_memory: Call | None = None
    asks_paused: Call | None = None
    flush = post("/flush_cache", {})
    default_max_new_tokens = 128
    seed = "sampling_seed"
    grammars: tuple[str, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
    penalties: tuple[tuple[str, float], ...] = (
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
    )
    weights = SGLangWeights()

    def check_sampling(self, params: Any) -> dict[str, Any]:
        """See ``Dialect.check_sampling``. ``max_tokens`` and ``seed`` are other names that users of engines write."""
        given = rules.as_mapping(params, _KNOWN)
        rules.check_members(given)
        given.pop("n", None)
        for other, own in _OTHER_NAMES.items():
            if given.get(other) is not None and given.get(own) is not None:
                raise ValueError(
                    f"{other} ({shown(given[other])}) and {own} ({shown(given[own])}) are the same thing: give one"
                )
            if (value := given.pop(other, None)) is not None:
                given[own] = value
        rules.check_values(given, SAMPLING_RULES)
        return {key: value for key, value in given.items() if value is not None}

    def resumed_seed(self, seed: int, done: int) -> int:  # noqa: ARG002 - other engines need it
        """See ``Dialect.resumed_seed``. SGLang hashes the seed with each token's position, which goes on by itself."""
        return seed

    def generate_routes(self, prompt: Prompt, facts: Facts) -> tuple[str, ...]:  # noqa: ARG002 - others have several
        """See ``Dialect.generate_routes``."""
        return ("/generate",)

    def encode_generate(
        self,
        prompt: Prompt,
        rid: str,
        *,
        facts: Facts,
        dp_rank: int | None,
        route: str | None = None,  # noqa: ARG002 - there is one only
    ) -> Call:
        """See ``Dialect.encode_generate``."""
        rules.refuse_unknown(prompt.sampling_params, SAMPLING_RULES, "SGLang")
        params = rules.with_seed(prompt.sampling_params, self.resumed_seed)
        body: dict[str, Any] = {**prompt.fields, "rid": rid, "sampling_params": params}
        if prompt.input_ids is not None:
            body["input_ids"] = prompt.input_ids
        else:
            body["text"] = prompt.text
            body.setdefault("return_prompt_token_ids", True)  # without them a partial could not be resumed
        if prompt.image_data is not None:
            body["image_data"] = prompt.image_data
        if dp_rank is not None:
            body |= _rank_fields(dp_rank, facts.version)
        return post("/generate", body, admin=False)

    def large_fields(self, prompt: Prompt, facts: Facts, dtype: str) -> tuple[LargeField, ...]:
        """See ``Dialect.large_fields``."""
        fields = prompt.fields
        if not (fields.get("return_routed_experts") or fields.get("return_indexer_topk")):
            return (_LOGPROBS,)
        wanted = narrowest(facts.experts.count) if dtype == "auto" else dtype
        return LargeField(("meta_info", "routed_experts"), wanted), _INDEXER, _LOGPROBS

    def decode_generate(self, answer: Any, prompt: Prompt, rid: str, facts: Facts, dtype: str) -> Segment:
        """See ``Dialect.decode_generate``."""
        version = version_tuple(facts.version)
        cuts_rows = version >= _ROWS_CUT_SINCE if version else None
        return decode(answer, prompt, rid, facts.experts, dtype, cuts_rows=cuts_rows)

    def abort(self, rid: str | None) -> Call:
        """See ``Dialect.abort``. SGLang matches rids by prefix, so ours all have the same length."""
        return post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def abort_ways(self, rid: str | None) -> tuple[tuple[Call, ...], ...]:
        """See ``Dialect.abort_ways``."""
        return ((self.abort(rid),),)

    def lacks(self, call: Call, status: int, words: str) -> bool:  # noqa: ARG002 - others need them
        """See ``Dialect.lacks``."""
        return status in {404, 405}

    def hint(self, call: Call, status: int, words: str) -> str:  # noqa: ARG002 - others need them
        """See ``Dialect.hint``. SGLang's own words say it."""
        return ""

    def read_census(self, answer: Any) -> int | None:  # noqa: ARG002 - others have one
        """See ``Dialect.read_census``."""
        return None

    def load_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.load_calls``. Without ``include``: every section; ``/server_info`` holds no counts."""
        return get("/v1/loads"), get("/get_load")

    def read_load(self, call: Call, answer: Any, dp_size: int) -> LoadReading:
        """See ``Dialect.read_load``."""
        return read_loads(answer, dp_size, live=call.path == "/get_load")

    def work_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.work_calls``."""
        return ()

    def facts_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.facts_calls``."""
        return get("/server_info"), get("/get_server_info")

    def read_facts(self, answer: Any) -> Facts:
        """See ``Dialect.read_facts``."""
        return read_facts(answer)

    def more_facts_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.more_facts_calls``."""
        return ()

    def scheduler_calls(self) -> tuple[Call, ...]:
        """See ``Dialect.scheduler_calls``."""
        return self.facts_calls()

    def barrier(self, rid: str) -> Call | None:  # noqa: ARG002 - others need one
        """See ``Dialect.barrier``."""
        return None

    def reach_call(self) -> Call:
        """See ``Dialect.reach_call``."""
        return self.version_call()

    def version_call(self) -> Call:
        """See ``Dialect.version_call``."""
        return get("/model_info")

    def read_version(self, answer: Any) -> str | None:
        """See ``Dialect.read_version``."""
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    def pause(self, mode: str) -> Call:
        """See ``Dialect.pause``."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode must be one of {PAUSE_MODES}, got {shown(mode)}")
        return post("/pause_generation", {"mode": mode})

    def resume(self) -> Call:
        """See ``Dialect.resume``. The body is required from 0.5.6 on."""
        return post("/continue_generation", {})

    def release_memory(self, tags: list[str] | None) -> Call:
        """See ``Dialect.release_memory``."""
        return post("/release_memory_occupation", {"tags": tags} if tags is not None else {}, long=True)

    def resume_memory(self, tags: list[str] | None) -> Call:
        """See ``Dialect.resume_memory``."""
        return post("/resume_memory_occupation", {"tags": tags} if tags is not None else {}, long=True)

    def says_paused(self, status: int, body: Body) -> bool:
        """See ``Dialect.says_paused``."""
        return status == 503 and "paused" in error_text(body).lower() + body[:500].decode("utf-8", "replace").lower()


def _rank_fields(rank: int, version: str | None) -> dict[str, int]:
    """Both names, but for engines known to read the new one: the old name is deprecated there."""
    if version_tuple(version) >= _RANK_FIELD_SINCE:
        return {"routed_dp_rank": rank}
    return {"routed_dp_rank": rank, "data_parallel_rank": rank}
