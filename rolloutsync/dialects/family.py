"""Which family a server belongs to, by its answers to a few cheap probes."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from rolloutsync.dialects.base import Call

if TYPE_CHECKING:
    from collections.abc import Mapping


class Family(str, Enum):
    """What answers at a URL."""

    SGLANG = "sglang"
    VLLM = "vllm"
    ROUTER = "router"  # not an engine: it passes requests on to some

    def __str__(self) -> str:
        return self.value


_VERSION, _WORKERS, _MODEL = "/version", "/workers", "/model_info"
_OLD_WORKERS, _OLD_MODEL = "/list_workers", "/get_model_info"
PROBES: tuple[Call, ...] = tuple(
    Call(method="GET", path=path) for path in (_VERSION, _WORKERS, _MODEL, _OLD_WORKERS, _OLD_MODEL)
)


def family(answers: Mapping[str, Any]) -> Family | None:
    """The family, or None where it is not known yet: make the next of ``PROBES``, until there are none.

    The order matters: a router may pass a question about the model on to a worker, so it is asked for its workers
    before an engine is believed to be one.

    Args:
        answers: The parsed answer to each probe so far, by path; None where it was an error answer or not JSON.
    """
    if _has_text(answers.get(_VERSION), "version"):
        return Family.VLLM
    if any(_lists(answers.get(path)) for path in (_WORKERS, _OLD_WORKERS)):
        return Family.ROUTER
    engine = _WORKERS in answers and _has_text(answers.get(_MODEL), "model_path")
    old_engine = _OLD_WORKERS in answers and _has_text(answers.get(_OLD_MODEL), "model_path")
    return Family.SGLANG if engine or old_engine else None


def _has_text(answer: Any, key: str) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get(key), str) and bool(answer[key])


def _lists(answer: Any) -> bool:
    """Whether a router tells its workers: as objects, or as bare URLs."""
    workers = answer.get("workers", answer.get("urls")) if isinstance(answer, dict) else None
    return isinstance(workers, list)
