"""The token stream of one request: computed lazily, ended by the model, a stop or the length."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolloutsync.sim import tokens
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.tokenizer import Tokenizer
from rolloutsync.sim.tokens import Hashes


@dataclass(frozen=True)
class Stop:
    """Why a stream ended by itself."""

    matched: int | str


@dataclass(frozen=True)
class Model:
    """What all streams of an engine share."""

    vocab_size: int
    threshold: int
    tokenizer: Tokenizer


class TokenStream:
    """The output tokens of one request. Not thread-safe; one event loop uses it.

    Nothing is computed before `grow`. A change of weights cuts off what was computed ahead of the tokens that count.
    """

    def __init__(self, model: Model, prompt: Sequence[int], sampling: Sampling, limit: int, version: str) -> None:
        self.tokens: list[int] = []
        self.stop: Stop | None = None
        self.limit = limit
        self.spans: list[tuple[int, str]] = [(0, version)]
        self.prompt_prefixes = tokens.prefix_hashes(prompt)
        self.prompt_hash = int(self.prompt_prefixes[-1])
        self._model = model
        self._sampling = sampling
        self._seed = sampling.seed or 0
        self._state = self.prompt_hash
        self._key = tokens.stream_key(self._seed, version)

    @property
    def runs_free(self) -> bool:
        """Whether only the length can end it, so that nobody needs to look ahead."""
        sampling = self._sampling
        stops = sampling.stop or sampling.stop_regex or (sampling.stop_ids_always and sampling.stop_token_ids)
        return sampling.ignore_eos and not stops

    @property
    def version(self) -> str:
        """The weights that produce the next token."""
        return self.spans[-1][1]

    def grow(self, count: int) -> None:
        """Computes tokens until there are `count`, or the stream ends."""
        count = min(count, self.limit)
        while self.stop is None and len(self.tokens) < count:
            self._extend(count - len(self.tokens))

    def _extend(self, count: int) -> None:
        start = len(self.tokens)
        forced = self._sampling.min_new_tokens - start
        if self._sampling.ignore_eos or forced > 0:
            span = count if self._sampling.ignore_eos else min(count, forced)
            new, self._state = tokens.draw(self._state, self._key, span, self._model.vocab_size)
            ended = False
        else:
            new, self._state, ended = tokens.draw_until_eos(
                self._state, self._key, count, self._model.vocab_size, self._model.threshold
            )
        self.tokens += new
        if ended:
            self.stop = Stop(tokens.EOS_TOKEN_ID)
        self._look_for_stops(start)

    def _look_for_stops(self, start: int) -> None:
        found = [hit for hit in (self._stop_token(start), self._stop_text(start)) if hit is not None]
        if not found:
            return
        count, matched = min(found, key=lambda hit: hit[0])
        if count <= len(self.tokens):
            del self.tokens[count:]
            self.stop = Stop(matched)

    def _stop_token(self, start: int) -> tuple[int, int] | None:
        ids = self._sampling.stop_token_ids
        first = max(start, self._sampling.min_new_tokens)
        if not ids or (self._sampling.ignore_eos and not self._sampling.stop_ids_always):
            return None
        hits = (position for position in range(first, len(self.tokens)) if self.tokens[position] in ids)
        position = next(hits, None)
        return None if position is None else (position + 1, self.tokens[position])

    def _stop_text(self, start: int) -> tuple[int, str] | None:
        sampling = self._sampling
        if not (sampling.stop or sampling.stop_regex):
            return None
        longest = max((len(string.encode()) for string in sampling.stop), default=0)
        first = 0 if sampling.stop_regex else max(0, start - longest)
        text = b"".join(self._model.tokenizer.pieces(self.tokens[first:start]))
        for position in range(start, len(self.tokens)):
            text += self._model.tokenizer.piece(self.tokens[position])
            matched = self._match(text)
            if matched is not None:
                return position + 1, matched
        return None

    def _match(self, text: bytes) -> str | None:
        """Returns the stop string that is in a text, or else the stop regex that finds something there."""
        for string in self._sampling.stop:
            if string.encode() in text:
                return string
        decoded = text.decode("utf-8", "replace") if self._sampling.stop_regex else ""
        return next((pattern for pattern in self._sampling.stop_regex if re.search(pattern, decoded)), None)

    def change_weights(self, version: str, count: int) -> None:
        """Lets everything behind the first `count` tokens come from other weights."""
        self.cut(count)
        self.stop = None
        self._state = tokens.context_hash(self.tokens, self.prompt_hash)
        self._key = tokens.stream_key(self._seed, version)
        if self.spans[-1][0] == count:
            self.spans.pop()
        self.spans.append((count, version))

    def cut(self, count: int) -> None:
        """Forgets all tokens behind the first `count`, for good."""
        self.grow(count)
        del self.tokens[count:]

    def text(self, count: int, *, final: bool = True) -> str:
        """Returns the text of the first `count` tokens, without the stop where it came within them.

        Unless `final`, bytes at the end that may become a character are held back.
        """
        keep = self.tokens[:count]
        matched = self.stop.matched if self.stop and count >= len(self.tokens) else None
        if self._sampling.no_stop_trim or matched is None:
            return self._decode(keep, final=final)
        if isinstance(matched, int):
            return self._decode(keep[:-1], final=final)
        return self._decode(keep, final=final).partition(matched)[0]

    def _decode(self, ids: list[int], *, final: bool) -> str:
        data = b"".join(self._model.tokenizer.pieces(ids, special=not self._sampling.skip_special_tokens))
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)

    def versions(self, count: int) -> list[tuple[str, int, int]]:
        """Returns `(version, start, end)` of the first `count` tokens; one empty span where there are none."""
        starts = [start for start, _ in self.spans[1:]] + [count]
        spans = [(version, start, min(end, count)) for (start, version), end in zip(self.spans, starts, strict=True)]
        return [span for span in spans if span[1] < span[2]] or [(self.version, 0, 0)]

    def hashes(self, count: int) -> Hashes:
        """Returns the context's hash before each of the first `count` tokens, and behind the last."""
        return tokens.prefix_hashes(self.tokens[:count], self.prompt_hash)

    def prefixes(self, count: int) -> Hashes:
        """Returns the hash of every prefix of the prompt with the first `count` tokens."""
        return np.concatenate([self.prompt_prefixes, self.hashes(count)[1:]]) if count else self.prompt_prefixes

    def logprobs(self, count: int) -> list[float]:
        """Returns the log-probabilities of the first `count` tokens, each under the weights that produced it."""
        before, values = self.hashes(count)[:-1], []
        for version, start, end in self.versions(count):
            values += tokens.logprobs(before[start:end], self.tokens[start:end], tokens.text_key(version))
        return values


def model_of(vocab_size: int, mean_output_tokens: float) -> Model:
    """Makes what the streams of one engine share."""
    return Model(vocab_size, tokens.eos_threshold(mean_output_tokens), Tokenizer(vocab_size))
