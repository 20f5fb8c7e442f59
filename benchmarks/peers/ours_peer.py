"""RolloutClient with its default settings, but for the number of requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.harness.work import Work
from benchmarks.peers.base import Answer
from rolloutsync import RolloutClient, Sample


class Ours:
    """See the module."""

    def __init__(self, work: Work) -> None:
        self._work = work
        in_flight = max(1, -(-work.threads // len(work.urls)))
        self._client = RolloutClient(
            work.urls, engine_concurrency=in_flight, api_key=work.api_key or None, progress=False
        )

    def run(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """See ``Peer``."""
        return [_answer(sample) for sample in self.samples(prompts)]

    def samples(self, prompts: Sequence[list[int]]) -> list[Sample]:
        """One call of generate."""
        shape = self._work.shape
        return self._client.generate(prompts, shape.sampling, on_error="raise", **shape.fields)

    def close(self) -> None:
        """See ``Peer``."""
        self._client.close()


def _answer(sample: Sample) -> Answer:
    logprobs = np.empty(0, np.float32) if sample.logprobs is None else sample.logprobs
    return Answer(sample.rid, str(sample.meta_info["id"]), sample.output_ids, logprobs, sample.routed_experts)


def make(work: Work) -> Ours:
    """See ``make_peer``."""
    return Ours(work)
