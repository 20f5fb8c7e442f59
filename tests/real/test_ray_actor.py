"""The README's first example, from inside a Ray actor, step after step; on real SGLang and on the simulated one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from rolloutsync import Status
from tests.ray.cluster import local_ray
from tests.ray.guard import watch_threads

from .test_main_job import await_true, check_aligned, raw_counts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPTS = [[1, 2, 3, 4], "The quick brown fox", {"text": "Once upon a time", "metadata": {"id": 7}}]
SLOW_S = 0.1  # a token


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    with local_ray() as ray:
        yield ray


@pytest.fixture
def before_the_guard(cluster: ModuleType) -> None:
    """Ray outlives the test."""


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, before_the_guard: None) -> Iterator[None]:
    """Threads alone: Ray's channels are its own business."""
    yield from watch_threads(request.node.nodeid)


@pytest.fixture
def actor(cluster: ModuleType, llama_urls: Sequence[str]) -> Iterator[Any]:
    from rolloutsync.ray_actor import RolloutActor

    made = RolloutActor.options(num_cpus=0).remote(llama_urls)
    yield made
    cluster.kill(made)


def test_steps_of_a_trainer(cluster: ModuleType, actor: Any, llama_urls: Sequence[str]) -> None:
    """Generate, prove idle, and again; a step that is cut short gives partials; nothing is lost on the way."""
    get = cluster.get
    for _ in range(2):
        samples = get(actor.generate.remote(PROMPTS, {"temperature": 1.0, "max_new_tokens": 64}, n=8))
        assert [(s.index, s.member) for s in samples] == [(index, member) for index in range(3) for member in range(8)]
        assert {s.status for s in samples} <= {Status.COMPLETED, Status.TRUNCATED}
        assert [s.metadata for s in samples[16:]] == [{"id": 7}] * 8
        check_aligned(samples)
        assert get(actor.abort_until_idle.remote(30)).idle
    get(actor.control.remote("/slow_down", {"forward_sleep_time": SLOW_S}))
    running = actor.generate.remote(PROMPTS, {"max_new_tokens": 1000, "ignore_eos": True}, n=8)
    await_true(lambda: all(load.running == 4 for load in get(actor.loads.remote()).values()))
    assert get(actor.abort_until_idle.remote(30)).idle
    assert all(not any(raw_counts(url)) for url in llama_urls)
    samples = get(running)
    assert [s.status for s in samples] == [Status.ABORTED] * 24
    check_aligned([s for s in samples if s.logprobs is not None])
    stats = get(actor.stats.remote())
    assert (stats.admitted, stats.aborted, stats.open, stats.failed) == (72, 24, 0, 0)
