"""Log-probabilities in the four shapes that vLLM has for them."""

from __future__ import annotations

from typing import Any

from rolloutsync.sim import tokens
from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.request import SimRequest
from rolloutsync.sim.stream import Model
from rolloutsync.sim.tokens import Hashes
from rolloutsync.sim.vllm_engine import VllmJob

ALL_SINCE = (0, 33, 0)
MOST_ALL = 64  # what "all of the vocabulary" comes to here

Json = dict[str, Any]
# One position: candidates as (token, log-probability, rank), the token itself first.
Row = list[tuple[int, float, int]]


class Logprobs:
    """Makes them. Immutable."""

    def __init__(self, config: SimConfig, model: Model) -> None:
        self._config = config
        self._model = model

    def by_id(self, job: VllmJob, request: SimRequest, start: int, end: int) -> Json:
        """As `/inference/v1/generate` has them since 0.32: by token id, with ranks."""
        return {"content": [self._entry(row, job) for row in self._rows(job, request, start, end)]}

    def as_in_chats(self, job: VllmJob, request: SimRequest, start: int, end: int, *, words: bool) -> Json:
        """As it had them before, and has for texts: in the form of chats, each token by its text or a made-up one."""
        content = []
        for row in self._rows(job, request, start, end):
            most = len(row) if self._config.release >= ALL_SINCE else max(1, job.num_logprobs or 0)
            top = [self._chat(token, value, words=words) for token, value, _ in row[:most]]
            content.append(top[0] | {"top_logprobs": top})
        return {"content": content}

    def _chat(self, token: int, logprob: float, *, words: bool) -> Json:
        name = self._name(token, as_ids=not words)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if words else None}

    def by_text(self, job: VllmJob, request: SimRequest, start: int, end: int, *, as_ids: bool) -> Json:
        """As `/v1/completions` has them: by text, or by a made-up text that has the id."""
        rows = self._rows(job, request, start, end)
        names = [self._name(row[0][0], as_ids=as_ids) for row in rows]
        offsets, offset = [], len(request.stream.text(start, final=False)) if start else 0
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [row[0][1] for row in rows],
            "tokens": names,
            "top_logprobs": [{self._name(token, as_ids=as_ids): value for token, value, _ in row} for row in rows],
        }

    def of_prompt(self, job: VllmJob, request: SimRequest) -> list[Json | None] | None:
        """Those of the prompt, the first of which has none; None if not asked for."""
        if job.num_prompt_logprobs is None:
            return None
        stream, ids = request.stream, list(job.prompt[1:])
        rows = self._candidates(stream.prompt_prefixes[1:-1], ids, job.num_prompt_logprobs, stream.spans[0][1])
        return [None, *({str(each[0]): self._shown(*each) for each in row} for row in rows)]

    def _shown(self, token: int, logprob: float, rank: int) -> Json:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._name(token, as_ids=False)}

    def _entry(self, row: Row, job: VllmJob) -> Json:
        most = len(row) if self._config.release >= ALL_SINCE else max(1, job.num_logprobs or 0)
        top = [{"token_id": token, "logprob": value, "rank": rank} for token, value, rank in row[:most]]
        return top[0] | {"top_logprobs": top}

    def _name(self, token: int, *, as_ids: bool) -> str:
        return f"token_id:{token}" if as_ids else self._model.tokenizer.decode([token], special=True)

    def _rows(self, job: VllmJob, request: SimRequest, start: int, end: int) -> list[Row]:
        stream, rows = request.stream, []
        for version, low, high in stream.versions(end):
            span = slice(max(low, start), high)
            before = stream.hashes(end)[span]
            rows += self._candidates(before, stream.tokens[span], job.num_logprobs or 0, version)
        return rows

    def _candidates(self, before: Hashes, ids: list[int], count: int, version: str) -> list[Row]:
        key, count = tokens.text_key(version), MOST_ALL if count < 0 else count
        own = tokens.logprobs(before, ids, key)
        values, others = tokens.top_logprobs(before, count, key, self._config.vocab_size)
        return [_row(*each) for each in zip(ids, own, others, values, strict=True)]


def _row(token: int, logprob: float, others: list[int], values: list[float]) -> Row:
    """The token with the rank that it has among the others, and they with theirs."""
    rank = others.index(token) + 1 if token in others else len(others) + 1
    ranked = zip(others, values, range(1, len(others) + 1), strict=True)
    return [(token, logprob, rank), *(each for each in ranked if each[0] != token)]
