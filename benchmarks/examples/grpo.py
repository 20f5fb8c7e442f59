"""A complete synchronous GRPO-shaped loop: collect, rewards, weights, the next step with partials, an evaluation.

    python benchmarks/examples/grpo.py                      # two simulated engines
    python benchmarks/examples/grpo.py --url http://127.0.0.1:30000 --checkpoint ckpt/a ckpt/b

Only ``gradient_step`` is left out: it is yours, and ends with a checkpoint that the engines can read.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rolloutsync import Collected, RolloutClient, Sample
from rolloutsync.sim import SimFleet

GROUP, TARGET = 4, 6  # samples of a prompt, prompts of a step
TRAIN = {"temperature": 1.0, "max_new_tokens": 48, "min_new_tokens": 4, "sampling_seed": 1}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@dataclass(frozen=True)
class Step:
    """What one step came to."""

    collected: Collected
    mean_reward: float
    resumed: int
    evaluation: list[list[int]]
    versions: dict[str, str | None]


def prompts(seed: int) -> Iterator[dict[str, object]]:
    """An endless data set. ``metadata`` is yours: it comes back with each sample and is never sent."""
    chance = np.random.default_rng(seed)
    for number in itertools.count():
        yield {"input_ids": chance.integers(10, 400, chance.integers(4, 12)), "metadata": {"question": number}}


def reward(sample: Sample) -> float:
    """A checkable task: as many even tokens as odd ones."""
    return 1.0 - abs(2.0 * float(np.mean(sample.output_ids % 2)) - 1.0)


def score(group: list[Sample]) -> bool:
    """Rewards the members of a group in place; one whose members all got the same teaches nothing and is rejected."""
    group[:] = [replace(sample, reward=reward(sample)) for sample in group]
    return len({sample.reward for sample in group}) > 1


def advantages(group: list[Sample]) -> list[float]:
    """Rewards of a group, centred and scaled by their own spread (GRPO, arXiv:2402.03300)."""
    rewards = np.array([sample.reward for sample in group], np.float64)
    return [float(value) for value in (rewards - rewards.mean()) / (rewards.std() + 1e-6)]


def gradient_step(batch: list[list[Sample]], checkpoint: str) -> str:
    """Yours: a loss over ``output_ids``, ``logprobs`` and ``advantages``; the path of the new checkpoint."""
    for group in batch:
        for sample, advantage in zip(group, advantages(group), strict=True):
            assert sample.logprobs is not None
            assert np.isfinite(advantage * sample.logprobs).all()
    return checkpoint


def train(client: RolloutClient, checkpoints: Sequence[str], steps: int, *, verify: str | None = None) -> list[Step]:
    """Run the loop; weights of step k are called "k". Blocks until all steps are done."""
    source, done = prompts(seed=1), list[Step]()
    carried: list[list[Sample]] = []
    questions = [prompt["input_ids"] for prompt in itertools.islice(prompts(seed=2), 4)]
    for number in range(1, steps + 1):
        evaluation = client.start(questions, GREEDY)  # beside the step, and not disturbed by its end
        tokens = sum(len(sample.output_ids) for group in carried for sample in group)
        collected = client.collect(itertools.chain(carried, source), TRAIN, n=GROUP, target=TARGET, accept=score)
        answers = [sample.output_ids.tolist() for sample in evaluation.result()]
        checkpoint = gradient_step(collected.groups, checkpoints[number % len(checkpoints)])
        client.update_weights_from_disk(checkpoint, version=str(number), verify=verify)
        carried = collected.partials  # their members go on under the new weights
        mean = float(np.mean([sample.reward or 0.0 for sample in collected.samples]))
        done.append(Step(collected, mean, tokens, answers, client.weight_versions()))
    return done


def report(step: Step, number: int) -> str:
    mixed = sum(len(sample.weight_spans) > 1 for sample in step.collected.samples)
    return (
        f"step {number}: {step.collected!r}, mean reward {step.mean_reward:.3f}, {step.resumed} tokens carried in, "
        f"{mixed} samples of several weight versions, now serving {sorted(map(str, set(step.versions.values())))}"
    )


def main() -> None:
    """Run three steps and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", nargs="+", help="of engines; none: two simulated ones")
    parser.add_argument("--checkpoint", nargs="+", default=["sim/a", "sim/b"], help="to be loaded in turn")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.url:
        return run(options.url, options.checkpoint, options.steps)
    with SimFleet(engines=2, tokens_per_second=200.0, mean_output_tokens=20.0) as fleet:
        return run(fleet.urls, options.checkpoint, options.steps)


def run(urls: Sequence[str], checkpoints: Sequence[str], steps: int) -> None:
    with RolloutClient(urls) as client:
        for number, step in enumerate(train(client, checkpoints, steps, verify="checksum"), start=1):
            print(report(step, number))
        print(client.abort_until_idle())
        print(client.audit())


if __name__ == "__main__":
    main()
