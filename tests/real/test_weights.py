"""Weight updates and quiet blocks. Runs on real SGLang and on the simulated one (the longer ones: marker `slow`)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from rolloutsync import RolloutClient, Sample, Status, UpdateState, WeightUpdateError

from .kit import OFFLINE, RECIPE, Kit
from .launch import CPU_ENGINE, free_ports
from .test_main_job import LONG, SLOW_S, await_true, check_aligned, prompt, slow_down

GREEDY = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [prompt(number) for number in range(8)]
Serialize = Callable[[str], str]
BUCKETS = 3
STANDIN = """
import json, sys
print(json.dumps([[["w", "bfloat16", [2]]]] * 3), json.dumps("joined"), sep="\\n", flush=True)
for _ in sys.stdin:
    print(json.dumps("sent"), flush=True)
"""


@pytest.fixture
def client(llama_urls: Sequence[str], checkpoints: tuple[str, str]) -> Iterator[RolloutClient]:
    """A client of two engines that get their first weights back."""
    with RolloutClient(llama_urls) as made:
        yield made
        made.update_weights_from_disk(checkpoints[0], "default", "retract")


@pytest.fixture
def serialize(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[Serialize]:
    """Turns a checkpoint into what one rank of an engine takes."""
    if engine_kind == "sim":
        yield lambda path: path
        return
    kit: Kit = request.getfixturevalue("own_kit")
    with ExitStack() as stack:
        yield functools.cache(lambda path: stack.enter_context(_serialized(kit, path)))


@contextmanager
def _serialized(kit: Kit, path: str) -> Iterator[str]:
    process = _start([str(kit.python), str(RECIPE / "serialize.py"), path])
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()


class Trainer:
    """Rank 0 of a weight group: real for real engines; simulated ones await nobody."""

    def __init__(self, kit: Kit | None, port: int, world_size: int, name: str, checkpoint: str) -> None:
        command = [sys.executable, "-c", STANDIN]
        if kit is not None:
            options = [str(port), str(world_size), name, checkpoint, str(BUCKETS)]
            command = [str(kit.python), str(RECIPE / "broadcast.py"), *options]
        self._process = _start(command)
        self.buckets: list[list[tuple[str, str, list[int]]]] = self._hear()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def join(self) -> None:
        assert self._hear() == "joined"

    def broadcast(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._hear() == "sent"


def _start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, **OFFLINE, **CPU_ENGINE}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    )


def outputs(samples: Sequence[Sample]) -> list[list[int]]:
    assert {sample.status for sample in samples} == {Status.TRUNCATED}
    return [sample.output_ids.tolist() for sample in samples]


def versions(samples: Sequence[Sample]) -> set[str | None]:
    return {span.version for sample in samples for span in sample.weight_spans}


def running(client: RolloutClient) -> int:
    return sum(load.running for load in client.loads().values())


def test_greedy_outputs_follow_the_weights(client: RolloutClient, checkpoints: tuple[str, str]) -> None:
    """Other weights, other tokens; the first weights again, the first tokens again. The engines' checksums agree."""
    before = client.generate(PROMPTS, GREEDY)
    report = client.update_weights_from_disk(checkpoints[1], "w2", verify="checksum")
    assert [engine.state for engine in report.engines] == [UpdateState.UPDATED] * 2
    assert all(engine.flushed for engine in report.engines)
    other = client.generate(PROMPTS, GREEDY)
    assert versions(other) == {"w2"}
    assert set(client.weight_versions().values()) == {"w2"}
    again = client.update_weights_from_disk(checkpoints[0], "default", verify="checksum")
    assert {e.checksum for e in again.engines}.isdisjoint({e.checksum for e in report.engines})
    assert outputs(client.generate(PROMPTS, GREEDY)) == outputs(before)
    assert all(new != old for new, old in zip(outputs(other), outputs(before), strict=True))


@pytest.mark.slow
def test_a_checkpoint_that_is_not_there(client: RolloutClient, tmp_path: Path, checkpoints: tuple[str, str]) -> None:
    """Both engines keep their weights, are stale, and come back with the next update."""
    before = client.generate(PROMPTS, GREEDY)
    with pytest.raises(WeightUpdateError, match="2 of 2 engines do not have weights 'w3'") as caught:
        client.update_weights_from_disk(tmp_path / "missing", "w3")
    assert [engine.state for engine in caught.value.report.engines] == [UpdateState.STALE] * 2
    assert {str(engine.state) for engine in client.engines()} == {"quarantined"}
    client.update_weights_from_disk(checkpoints[0], "default")
    assert outputs(client.generate(PROMPTS, GREEDY)) == outputs(before)


@pytest.mark.slow
def test_tensors(
    client: RolloutClient, llama_urls: Sequence[str], checkpoints: tuple[str, str], serialize: Serialize
) -> None:
    """The same weights as from disk give the same checksum, and the same tokens."""
    from_disk = client.update_weights_from_disk(checkpoints[1], "w4", verify="checksum")
    wanted = client.generate(PROMPTS, GREEDY)
    client.update_weights_from_disk(checkpoints[0], "default")
    with client.weight_update("w4", verify="checksum") as update:
        update.from_tensor({url: [serialize(checkpoints[1])] for url in llama_urls})
    assert update.report is not None
    assert outputs(client.generate(PROMPTS, GREEDY)) == outputs(wanted)
    if not checkpoints[0].startswith("sim"):  # whose weights are a hash of how they came
        assert {e.checksum for e in update.report.engines} == {e.checksum for e in from_disk.engines}


@pytest.mark.slow
def test_a_broadcast(
    client: RolloutClient, checkpoints: tuple[str, str], engine_kind: str, request: pytest.FixtureRequest
) -> None:
    """A trainer of its own process group sends all weights in buckets, which need not wait for each other."""
    from_disk = client.update_weights_from_disk(checkpoints[1], "w7", verify="checksum")
    wanted = client.generate(PROMPTS, GREEDY)
    client.update_weights_from_disk(checkpoints[0], "default")
    kit = None if engine_kind == "sim" else request.getfixturevalue("own_kit")
    (port,) = free_ports(1)
    with Trainer(kit, port, 3, "test", checkpoints[1]) as trainer:
        group = client.init_group("127.0.0.1", port, group_name="test", backend="gloo")
        assert group.world_size == 3
        trainer.join()
        group.wait(60.0)
        with client.weight_update("w7", verify="checksum") as update:
            for bucket in trainer.buckets:
                names, dtypes, shapes = zip(*bucket, strict=True)
                update.from_distributed(names, dtypes, shapes, group_name="test")
                trainer.broadcast()
        client.destroy_group("test")
    assert update.report is not None
    assert len(update.report.updated) == 2
    assert outputs(client.generate(PROMPTS, GREEDY)) == outputs(wanted)
    if engine_kind != "sim":  # whose weights are a hash of how they came
        assert {e.checksum for e in update.report.engines} == {e.checksum for e in from_disk.engines}


@pytest.mark.slow
def test_the_colocated_sequence(
    client: RolloutClient, llama_urls: Sequence[str], checkpoints: tuple[str, str], serialize: Serialize
) -> None:
    """Memory away, and back in two steps around the tensors, all behind one proof of idle."""
    before = client.generate(PROMPTS, GREEDY)
    with client.quiesced() as report:
        assert report is not None
        assert report.idle
        client.release_memory(["weights", "kv_cache"])
        client.resume_memory(["weights"])
        with client.weight_update("w5") as update:
            update.from_tensor({url: [serialize(checkpoints[1])] for url in llama_urls})
        client.resume_memory(["kv_cache"])
    after = client.generate(PROMPTS, GREEDY)
    assert versions(after) == {"w5"}
    assert all(new != old for new, old in zip(outputs(after), outputs(before), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hold", "retract"])
def test_running_samples_go_on_with_the_new_weights(
    client: RolloutClient, checkpoints: tuple[str, str], mode: str
) -> None:
    """They are neither lost nor begun anew, and say which token came from which weights."""
    slow_down(client, SLOW_S / 4)
    params = {"max_new_tokens": 40, "ignore_eos": True}
    job = client.start(PROMPTS[:4], params)
    await_true(lambda: running(client) == 4)
    report = client.update_weights_from_disk(checkpoints[1], "w6", mode)
    samples = job.result()
    check_aligned(samples)
    assert [len(sample.output_ids) for sample in samples] == [40] * 4
    assert [sample.attempts for sample in samples] == [1] * 4
    assert [[span.version for span in sample.weight_spans] for sample in samples] == [["default", "w6"]] * 4
    assert [engine.flushed for engine in report.engines] == [mode == "retract"] * 2


@pytest.mark.slow
def test_quiesced_aborts(client: RolloutClient) -> None:
    """What ran comes back as a partial, what comes meanwhile is made after the block."""
    slow_down(client, SLOW_S)
    job = client.start(PROMPTS[:4], LONG)
    await_true(lambda: running(client) == 4)
    with client.quiesced() as report:
        assert report is not None
        assert report.idle
        assert [sample.status for sample in job.result()] == [Status.ABORTED] * 4
        slow_down(client, 0.0)
        later = client.start(PROMPTS, GREEDY)
        assert not later.wait(0.3)
    assert len(outputs(later.result())) == 8
