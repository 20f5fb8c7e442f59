"""What every dialect speaks of, and the interface that each implements."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from rolloutsync.errors import clip
from rolloutsync.payload import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rolloutsync.payload import Body, LargeField
    from rolloutsync.sample import Prompt, Segment

JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_LEADING_DIGITS = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request to be made.

    Attributes:
        method: GET or POST.
        path: Below the engine's base URL, with query.
        body: JSON bytes, or None.
        admin: Wants the admin key where there is one.
        long: A weight or memory call: long timeout, never re-sent.
        headers: Further headers, (name, value).
    """

    method: str
    path: str
    body: bytes | None = None
    admin: bool = False
    long: bool = False
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The shape of a model's routing. Each None where not known."""

    layers: int | None = None
    topk: int | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an engine says of itself. Each field None where it does not say.

    Attributes:
        running_limit: Requests that it runs at once, over all its ranks.
        model_path: As the engine names it; may be readable here.
        tp_size: Tensor-parallel ranks; each is one rank of a weight group.
        front_ends: Processes that take requests, each of which can abort its own alone.
    """

    version: str | None = None
    dp_size: int | None = None
    tp_size: int | None = None
    running_limit: int | None = None
    model_path: str | None = None
    front_ends: int | None = None
    weight_version: str | None = None
    vocab_size: int | None = None
    experts: Experts = field(default_factory=Experts)


class LoadKind(Enum):
    """What one reading of an engine's load amounts to."""

    BUSY = "busy"
    ZERO = "zero"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """One reading of an engine's load.

    Attributes:
        kind: UNKNOWN is never idle.
        running: Requests running, over all ranks.
        waiting: Requests waiting in any queue, over all ranks.
        tokens: Tokens held by requests, over all ranks.
        stamps: Each rank's own timestamp, or None where the engine answers live and has none.
        why: For UNKNOWN, what was wrong with it.
        frozen: UNKNOWN because the core of the engine does not answer.
        settles_s: A zero proves something only if all readings have said zero for so many seconds.
        basis: For ZERO, what it rests on beside the engine's load.
    """

    kind: LoadKind
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    stamps: tuple[float, ...] | None = None
    why: str = ""
    frozen: bool = False
    settles_s: float = 0.0
    basis: str = ""

    def __str__(self) -> str:
        if self.kind is LoadKind.UNKNOWN:
            return f"unknown ({self.why})"
        return f"{self.running} running, {self.waiting} waiting, {self.tokens} tokens"


def merged(facts: Facts, more: Facts) -> Facts:
    """``facts``, with what they leave open taken from ``more``."""
    told = {f.name: getattr(more, f.name) for f in fields(facts) if getattr(facts, f.name) is None}
    return replace(facts, **told)


def post(path: str, body: object = None, *, admin: bool = True, long: bool = False, option: int = JSON_OPTIONS) -> Call:
    """A POST of ``body`` as JSON; with None there is no body."""
    data = None if body is None else orjson.dumps(body, option=option)
    return Call(method="POST", path=path, body=data, admin=admin, long=long)


def get(path: str, *, admin: bool = False) -> Call:
    """A GET."""
    return Call(method="GET", path=path, admin=admin)


def unknown_load(why: str) -> LoadReading:
    """A reading that proves nothing."""
    return LoadReading(kind=LoadKind.UNKNOWN, why=why)


class WeightDialect(Protocol):
    """The calls of a weight update. None of them flushes a cache or aborts a request unasked.

    Attributes:
        modes: How engines can be made quiet.
        begin: Opens a session, which some versions want around ``from_tensor`` and ``from_distributed``.
        end: Closes it.
        checksum: Asks for a sum over the weights.
    """

    modes: tuple[str, ...]
    begin: Call
    end: Call
    checksum: Call

    def pause_mode(self, mode: str) -> str:
        """The engine's own word for the pause of one of ``modes``; ValueError names them."""

    def from_disk(self, path: str, fields: Mapping[str, Any]) -> Call:
        """Load a checkpoint; ``fields`` are sent through."""

    def from_tensor(self, tensors: Sequence[str | bytes], fields: Mapping[str, Any]) -> Call:
        """Take serialized tensors, one text (base64) or bytes for each tensor-parallel rank."""

    def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        fields: Mapping[str, Any],
    ) -> Call:
        """Receive a broadcast."""

    def set_version(self, version: str) -> Call:
        """Give the weights a label."""

    def init_group(self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> Call:
        """Join a process group; answered once all its ranks have."""

    def destroy_group(self, name: str) -> Call:
        """Leave it."""

    def refusal(self, answer: Any) -> str | None:
        """Why a call that was answered with 2xx did not work, or None."""

    def applied(self, status: int, words: str) -> bool:
        """Whether an error answer means that the weights are there all the same."""

    def already_open(self, words: str) -> bool:
        """Whether ``begin`` was refused for a session that is open."""

    def no_such_group(self, words: str) -> bool:
        """Whether ``destroy_group`` was refused because there is none."""

    def read_checksum(self, answer: Any) -> str | None:
        """The sum in the answer to ``checksum``, or None."""

    def keeps_label(self, facts: Facts) -> bool:
        """Whether the engine bears the label that ``set_version`` gives; without one nothing can be read back."""


class Vocabulary(Protocol):
    """What is known of sampling parameters before it is known which engine gets them."""

    default_max_new_tokens: int  # where a request does not say
    seed: str  # the sampling parameter
    grammars: tuple[str, ...]  # sampling parameters with a state that a resume loses
    penalties: tuple[tuple[str, float], ...]  # and their neutral values

    def check_sampling(self, params: Any) -> dict[str, Any]:
        """The user's sampling parameters in one vocabulary; ValueError or TypeError names what is wrong."""


class Dialect(Vocabulary, Protocol):
    """One engine family's HTTP API, as pure functions. Implementations are stateless and thread-safe.

    Attributes:
        ends_on_disconnect: A request ends at once when its connection does: where an engine cannot abort by id,
            shutting the socket is as good, but for the tokens.
        load_lags: The load is that of the core's last step: it shows neither what has just come nor a core that hangs,
            so a zero is no proof by itself.
        census: Aborts everything, which does an idle engine no harm, and says how much that was; None if there is no
            such call.
        health: Answered with 503, or not at all, once the engine has died; None if no call tells.
        pause_after_memory: To be sent to an engine that we hold paused when it has its memory again; None if it stays.
    """

    name: str
    flush: Call
    ends_on_disconnect: bool
    load_lags: bool
    census: Call | None
    health: Call | None
    pause_after_memory: Call | None
    asks_paused: Call | None  # answered with ``is_paused``; None if no call tells

    def resumed_seed(self, seed: int, done: int) -> int:
        """The seed that continues a sample of ``done`` tokens as if it had not been cut short."""

    @property
    def weights(self) -> WeightDialect:
        """The calls of a weight update."""

    def generate_routes(self, prompt: Prompt, facts: Facts) -> tuple[str, ...]:
        """The paths that can generate this sample, best first; the next one is for engines that lack it: ``lacks``."""

    def encode_generate(
        self, prompt: Prompt, rid: str, *, facts: Facts, dp_rank: int | None, route: str | None = None
    ) -> Call:
        """The request that generates one sample, by ``route`` or the best one.

        Raises:
            UnsupportedError: This family has no such thing as one of its parameters or fields; names it.
        """

    def lacks(self, call: Call, status: int, words: str) -> bool:
        """Whether an error answer means that the engine does not have this call: the next way may be tried."""

    def hint(self, call: Call, status: int, words: str) -> str:
        """What an operator can do about an error answer, or an empty string."""

    def large_fields(self, prompt: Prompt, facts: Facts, dtype: str) -> tuple[LargeField, ...]:
        """Where large base64 may be in this sample's answer; ``decode_generate`` takes it decoded or as text."""

    def decode_generate(self, answer: Any, prompt: Prompt, rid: str, facts: Facts, dtype: str) -> Segment:
        """The answer's segment; ProtocolError if it cannot be right."""

    def abort(self, rid: str | None) -> Call:
        """Abort one request, or all."""

    def abort_ways(self, rid: str | None) -> tuple[tuple[Call, ...], ...]:
        """The ways to abort one request, or all, best first; each is made of calls, one after the other."""

    def read_census(self, answer: Any) -> int | None:
        """The number in the answer to ``census``, or None where it does not tell."""

    def load_calls(self) -> tuple[Call, ...]:
        """The ways to ask for the load, best first; a 404 or 405 leads to the next."""

    def read_load(self, call: Call, answer: Any, dp_size: int) -> LoadReading:
        """What the answer to a load call, or to one of ``work_calls``, amounts to."""

    def work_calls(self) -> tuple[Call, ...]:
        """Calls that may show work which the load does not show yet: BUSY counts, anything else says nothing."""

    def facts_calls(self) -> tuple[Call, ...]:
        """The ways to ask what the engine is, best first."""

    def read_facts(self, answer: Any) -> Facts:
        """What the answer to a facts call says."""

    def more_facts_calls(self) -> tuple[Call, ...]:
        """What to ask besides, for what the facts leave open; one that fails is no matter."""

    def scheduler_calls(self) -> tuple[Call, ...]:
        """The ways to ask something that only a live scheduler answers, best first."""

    def barrier(self, rid: str) -> Call | None:
        """A request for one token, by which the core must have ended a step; None where the load does not lag."""

    def reach_call(self) -> Call:
        """The cheapest call there is; answered even by a frozen engine."""

    def version_call(self) -> Call:
        """The cheapest call that tells the weight version."""

    def read_version(self, answer: Any) -> str | None:
        """The weight version in the answer to that call, or None."""

    def pause(self, mode: str) -> Call:
        """Pause; ValueError names the modes that exist."""

    def resume(self) -> Call:
        """End a pause."""

    def release_memory(self, tags: list[str] | None) -> Call:
        """Give GPU memory back; only when proven idle."""

    def resume_memory(self, tags: list[str] | None) -> Call:
        """Take GPU memory again."""

    def says_paused(self, status: int, body: Body) -> bool:
        """Whether an error answer means that the engine is paused."""


def error_text(body: Body) -> str:
    """The engine's own words in an error answer: a dict, a string or an object error, a detail, or plain text."""
    try:
        value = parse_json(body)
    except ValueError:
        value = body.decode("utf-8", "replace")
    return error_words(value)


def error_words(value: Any) -> str:
    """The same for an answer that is parsed already."""
    while isinstance(value, dict):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
        if inner is None:
            break
        value = inner
    return clip_words(value)


def clip_words(value: Any) -> str:
    """A value on one line, not too long."""
    return clip(" ".join(str(value).split()), 600) or "(empty answer)"


def model_experts(config: Mapping[str, Any]) -> Experts:
    """Layers, top-k and number of routed experts from a model's ``config.json``."""
    text = config.get("text_config")
    source = text if isinstance(text, dict) else config
    counts = (source.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    return Experts(
        layers=positive(source.get("num_hidden_layers")),
        topk=positive(source.get("num_experts_per_tok")),
        count=next((count for count in map(positive, counts) if count), None),
    )


def model_vocab(config: Mapping[str, Any]) -> int | None:
    """The vocabulary size from a model's ``config.json``."""
    text = config.get("text_config")
    return positive((text if isinstance(text, dict) else config).get("vocab_size"))


def positive(value: Any) -> int | None:
    """The value if it is a positive integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@functools.lru_cache(maxsize=256)
def version_tuple(version: str | None) -> tuple[int, ...]:
    """``"0.5.10.post2"`` and ``"0.5.10rc1"`` as (0, 5, 10); empty where unknown, which sorts before every version."""
    numbers: list[int] = []
    for part in (version or "").split(".")[:3]:
        digits = _LEADING_DIGITS.match(part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return tuple(numbers)
