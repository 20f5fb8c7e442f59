"""What a router says of its workers, in every form, and what it does to a request on its way. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from rolloutsync.config import parse_url
from rolloutsync.errors import ProtocolError, UnsupportedError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LISTS = ("/workers", "/list_workers")  # the former is the newer; sglang-router 0.2 has both
_RANK = re.compile(r"@\d+$", re.ASCII)
_UNKNOWN = "unknown"

# What sglang-router 0.2.1 and 0.3.2 pass on of a body that they read and write anew; tested against the real one.
KEPT_FIELDS = frozenset(
    {
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
        *("return_hidden_states", "priority", "lora_path", "lora_id", "session_params", "extra_key", "modalities"),
        *("image_data", "video_data", "audio_data", "data_parallel_rank", "custom_logit_processor", "log_metrics"),
        *("conversation_id", "return_bytes", "return_entropy", "custom_labels", "background"),
    }
)
KEPT_SAMPLING = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
        *("presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "sampling_seed", "ignore_eos"),
        *("skip_special_tokens", "no_stop_trim", "json_schema", "regex", "ebnf"),
    }
)
KEPT_BY_NEWER = KEPT_SAMPLING | {"custom_params"}  # smg 1.13, which passes every field on
_BECOMES_A_HEADER = frozenset({"session_id"})


class Role(str, Enum):
    """What a worker does."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine behind a router.

    Attributes:
        url: Its base URL, without a rank.
        role: See ``Role``.
        ranks: How many entries it has in the list: one for each rank where the router tells ranks apart.
        healthy: By the router's word, which may be minutes old; None where it says nothing.
        model: None where the router does not know.
        runtime: "sglang", "vllm", ...; None where the router does not say.
    """

    url: str
    role: Role = Role.REGULAR
    ranks: int = 1
    healthy: bool | None = None
    model: str | None = None
    runtime: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The workers of a router, each once.

    Attributes:
        workers: In the router's order.
        forwards_all: It passes on fields that it does not know itself.
    """

    workers: tuple[Worker, ...] = ()
    forwards_all: bool = False

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the workers."""
        return tuple(worker.url for worker in self.workers)

    @property
    def disaggregated(self) -> bool:
        """Whether some prefill and others decode: then nobody but the router can generate."""
        return any(worker.role is not Role.REGULAR for worker in self.workers)


def read_listing(answer: Any) -> Listing:
    """The workers in the answer to one of ``LISTS``. Dead ones are among them: the router's word on health is old.

    Raises:
        ProtocolError: Not a list of workers, or one with an entry that has no URL.
        UnsupportedError: There are workers that cannot be driven: of several models, over gRPC, or disaggregated ones
            that are not SGLang.
    """
    entries = _entries(answer)
    found: dict[str, Worker] = {}
    for entry in entries:
        worker = _read(entry)
        known = found.get(worker.url)
        found[worker.url] = worker if known is None else _joined(known, worker)
    forwards_all = bool(entries) and all(isinstance(entry, dict) and "runtime_type" in entry for entry in entries)
    listing = Listing(tuple(found.values()), forwards_all)
    _check(listing)
    return listing


def _entries(answer: Any) -> list[Any]:
    entries = answer.get("workers", answer.get("urls")) if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ProtocolError(f"this is not a router's list of workers: {shown(answer)}")
    return entries


def _read(entry: Any) -> Worker:
    """An entry is an object, or a bare URL; the URL may end in ``@rank``, which nobody can dial."""
    facts: dict[str, Any] = entry if isinstance(entry, dict) else {"url": entry}
    url = facts.get("url") or facts.get("base_url")
    if not isinstance(url, str):
        raise ProtocolError(f"the router lists a worker without a URL: {shown(entry)}")
    if url.startswith("grpc") or _text(facts.get("connection_mode")).startswith("grpc"):
        raise UnsupportedError(f"the router speaks gRPC with its worker {url}: only HTTP can be driven")
    try:
        plain = parse_url(_RANK.sub("", url))
    except ValueError as error:
        raise ProtocolError(f"the router lists a worker that nobody can dial: {error}") from None
    healthy, model = facts.get("is_healthy"), facts.get("model_id")
    return Worker(
        url=plain,
        role=_role(facts.get("worker_type")),
        healthy=healthy if isinstance(healthy, bool) else None,
        model=model if isinstance(model, str) and model not in {"", _UNKNOWN} else None,
        runtime=_text(facts.get("runtime_type")) or None,
    )


def _text(value: Any) -> str:
    """A word in lower case; one with details, ``{"Prefill": {...}}``, is its key."""
    if isinstance(value, dict):
        value = next(iter(value), "")
    return value.lower() if isinstance(value, str) else ""


def _role(value: Any) -> Role:
    word = _text(value)
    return Role(word) if word in {Role.PREFILL.value, Role.DECODE.value} else Role.REGULAR


def _joined(known: Worker, other: Worker) -> Worker:
    """Two entries of one engine: two ranks, or the same thing twice."""
    role = other.role if known.role is Role.REGULAR else known.role
    healthy = other.healthy if known.healthy is None else known.healthy or bool(other.healthy)
    return replace(known, role=role, ranks=known.ranks + 1, healthy=healthy, model=known.model or other.model)


def _check(listing: Listing) -> None:
    by_model: dict[str, list[str]] = defaultdict(list)
    for worker in listing.workers:
        if worker.model is not None:
            by_model[worker.model].append(worker.url)
        if listing.disaggregated and worker.runtime not in {None, _UNKNOWN, "sglang"}:
            words = f"its disaggregated worker {worker.url} is {worker.runtime}"
            raise UnsupportedError(f"the router cannot pass token ids on: {words}, not SGLang")
    if len(by_model) > 1:
        advice = "give the engines of one of them to RolloutClient(urls)"
        raise UnsupportedError(f"the router serves several models, {dict(by_model)}: {advice}")


def lost(fields: Mapping[str, Any], sampling: Iterable[str], *, forwards_all: bool) -> list[str]:
    """Names of request fields and sampling parameters that a router drops without a word.

    Args:
        fields: With their values: one that is None or False asks for nothing.
        sampling: Names of the parameters.
        forwards_all: See ``Listing``.
    """
    known = KEPT_BY_NEWER if forwards_all else KEPT_SAMPLING
    asked = [name for name, value in fields.items() if value is not None and value is not False]
    wanted = [] if forwards_all else asked
    dropped = [name for name in wanted if name not in KEPT_FIELDS | _BECOMES_A_HEADER]
    return [*dropped, *(f"sampling_params[{name!r}]" for name in sampling if name not in known)]


def check_kept(
    fields: Mapping[str, Any], sampling: Iterable[str], *, router: str, forwards_all: bool, rid: str | None = None
) -> None:
    """Raise UnsupportedError for a request that would not arrive at the engines as it was meant."""
    dropped = lost(fields, sampling, forwards_all=forwards_all)
    if dropped:
        why = "engines that prefill and engines that decode are reached through their router alone"
        words = f"the router drops {', '.join(dropped)} without a word, and {why}: nothing was sent"
        raise UnsupportedError(words, engine=router, rid=rid)
