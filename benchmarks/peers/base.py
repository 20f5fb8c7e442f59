"""What every peer makes of an answer, and the check that none of them cheats."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pybase64

from benchmarks.harness.work import Shape, Work


class Answer(NamedTuple):
    """One answer as a trainer wants it."""

    asked: str
    told: str
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    experts: npt.NDArray[Any] | None


class Peer(Protocol):
    """A client."""

    def run(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Blocks until every prompt is answered; in order."""

    def close(self) -> None:
        """Ends its threads and sockets."""


def payloads(work: Work, prompts: Sequence[list[int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(URL of the engine, body) of each request."""
    fields, sampling = work.shape.fields, work.shape.sampling
    for url, prompt in zip(itertools.cycle(work.urls), prompts, strict=False):
        yield url, {"rid": uuid.uuid4().hex, "input_ids": prompt, "sampling_params": sampling, **fields}


def read(answer: dict[str, Any], rid: str, shape: Shape) -> Answer:
    """A parsed body to arrays, the way trainers do it."""
    meta = answer["meta_info"]
    experts = None
    if shape.layers:
        raw = pybase64.b64decode(meta["routed_experts"].encode("ascii"))
        rows = meta["prompt_tokens"] + len(answer["output_ids"]) - 1
        experts = np.frombuffer(raw, np.int32).reshape(rows, shape.layers, shape.topk)
    return Answer(rid, meta["id"], *columns(answer), experts)


def columns(answer: dict[str, Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Token ids and logprobs of a parsed body."""
    rows = answer["meta_info"]["output_token_logprobs"]
    return np.array(answer["output_ids"], np.int32), np.array([row[0] for row in rows], np.float32)


def check(answers: Sequence[Answer], work: Work, count: int) -> None:
    """Every answer is there, is the one that was asked for, and is whole.

    Raises:
        ValueError: Not so; says what is wrong.
    """
    if len(answers) != count:
        raise ValueError(f"{work.peer}: {len(answers)} answers to {count} requests")
    for number, answer in enumerate(answers):
        wrong = fault(answer, work.shape, exact=work.checked)
        if wrong:
            raise ValueError(f"{work.peer}: answer {number}: {wrong}")


def fault(answer: Answer, shape: Shape, *, exact: bool) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if answer.asked != answer.told:
        return f"bears the id {answer.told!r}, asked for was {answer.asked!r}"
    if answer.ids.dtype != np.int32 or answer.logprobs.dtype != np.float32:
        return f"ids are {answer.ids.dtype}, logprobs {answer.logprobs.dtype}"
    if len(answer.ids) != len(answer.logprobs) or (exact and len(answer.ids) != shape.tokens):
        return f"{len(answer.ids)} ids, {len(answer.logprobs)} logprobs, wanted {shape.tokens}"
    if exact and shape.layers:
        return _experts_fault(answer.experts, (shape.rows, shape.layers, shape.topk))
    return ""


def _experts_fault(experts: npt.NDArray[Any] | None, wanted: tuple[int, ...]) -> str:
    if experts is None:
        return "no experts"
    return "" if experts.shape == wanted else f"experts are {experts.shape}, wanted {wanted}"
