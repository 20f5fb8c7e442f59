"""The example trainer of benchmarks/examples, on simulated engines and on real ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rolloutsync import RolloutClient, Status
from tests.processes import ROOT, run


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.examples.grpo")


@pytest.fixture
def client(llama_urls: Sequence[str], checkpoints: tuple[str, str]) -> Iterator[RolloutClient]:
    with RolloutClient(llama_urls) as made:
        yield made
        made.update_weights_from_disk(checkpoints[0], version="default")


@pytest.mark.parametrize("steps", [3])
def test_the_example_trainer(client: RolloutClient, checkpoints: tuple[str, str], grpo: Any, steps: int) -> None:
    """Targets met, weights updated and verified, greedy answers changed, partials carried over, nothing left."""
    done = grpo.train(client, checkpoints, steps, verify="checksum")
    for number, step in enumerate(done, start=1):
        assert step.collected.complete
        assert len(step.collected.groups) == grpo.TARGET
        assert {len(group) for group in step.collected.groups} == {grpo.GROUP}
        assert {sample.status for sample in step.collected.samples} <= {Status.COMPLETED, Status.TRUNCATED}
        assert set(step.versions.values()) == {str(number)}
        assert [len(answer) for answer in step.evaluation] == [8] * 4
    assert done[0].evaluation != done[1].evaluation
    assert done[1].evaluation != done[2].evaluation
    for step, before in zip(done[1:], done, strict=False):
        assert step.resumed == sum(len(s.output_ids) for group in before.collected.partials for s in group)
    for sample in done[-1].collected.samples:
        ends = [0, *(span.end for span in sample.weight_spans)]
        assert [span.start for span in sample.weight_spans] == ends[:-1]
        assert ends[-1] == len(sample.output_ids)
    assert client.audit().balanced
    assert client.audit().open == ()


@pytest.mark.slow
def test_the_example_runs_as_a_script() -> None:
    """What its docstring says."""
    code = "import runpy, sys; sys.argv = ['grpo']; runpy.run_path('benchmarks/examples/grpo.py', run_name='__main__')"
    ended = run(code, timeout=60.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ended by target") == 3
    assert "0 open: balanced" in ended.stdout
