"""B20 to B22: samples that are cut again and again. What a resumed request says is in ``client/test_partials``."""

from __future__ import annotations

import pytest

from rolloutsync import Status
from tests.client.kit import completion
from tests.faults.engine import LiveEngine
from tests.faults.kit import MakeClient, echo_ids
from tests.wire import Request, Script, answer

CUTS = [([], "2"), ([501], "4"), ([502, 503, 504, 505, 506], "6")]
TOKENS = [501, 502, 503, 504, 505, 506]


@pytest.mark.parametrize("keep", [True, False])
def test_three_rounds_of_aborts(client_to: MakeClient, keep: bool) -> None:
    """B21, B22: cut after none, one and five tokens under three weight versions, then whole: lists of one length, spans
    that tile the output, a budget that shrinks with it; or, if partials are not kept, the bare prompt each time.
    """
    cuts, params = iter(CUTS), {"max_new_tokens": 100}

    def aborted(request: Request) -> Script:
        ids, version = next(cuts)
        return [answer(completion(request, ids=ids, finish_reason={"type": "abort"}, weight_version=version))]

    with LiveEngine(aborted=aborted) as engine:
        client = client_to(engine.url)
        batch: list[object] = [[7, 8]]
        for kept, new in ((0, 0), (1, 1), (6, 5)):
            job = client.start(batch, params, keep_partials=keep)
            engine.journal.await_running(1)
            job.abort()
            (sample,) = job.result()
            assert (sample.status, sample.error) == (Status.ABORTED, None)
            assert len(sample.output_ids) == (kept if keep else new)
            assert sample.logprobs is not None
            assert len(sample.logprobs) == len(sample.output_ids)
            batch = [sample]
        job = client.start(batch, params, keep_partials=keep)
        engine.journal.await_running(1)
        engine.finish()
        (sample,) = job.result()
        before = TOKENS if keep else []
        assert sample.status is Status.TRUNCATED
        assert sample.output_ids.tolist() == before + echo_ids([7, 8, *before])
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.output_ids)
        spans = [("4", 0, 1), ("6", 1, 6), (None, 6, 9)] if keep else [(None, 0, 3)]
        assert [tuple(span) for span in sample.weight_spans] == spans
        sent = [(body["input_ids"][2:], body["sampling_params"]["max_new_tokens"]) for body in engine.bodies()]
        assert sent == ([([], 100), ([], 100), ([501], 99), (TOKENS, 94)] if keep else [([], 100)] * 4)
        assert params == {"max_new_tokens": 100}
