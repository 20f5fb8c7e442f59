"""The measured process of ``collate``: one batch, made of samples that are there already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.harness.process import answer_spec, cpu_s, forget_peak, memory_bytes, trimmed_bytes
from rolloutsync.sample import Prompt, Sample, Status, WeightSpan
from rolloutsync.tensors import collate, pack

MB = 1e6
Batch = dict[str, Any]
Tensors = list[Any]


def samples_of(count: int, tokens: int, layers: int, topk: int) -> list[Sample]:
    """All of one length, an eighth of it prompt; each made by two weight versions, with experts if there are layers."""
    random, prompt = np.random.default_rng(1), tokens // 8
    output = tokens - prompt
    return [
        Sample(
            prompt=Prompt(input_ids=random.integers(0, 150_000, prompt, np.int32)),
            index=index,
            member=0,
            status=Status.COMPLETED,
            output_ids=random.integers(0, 150_000, output, np.int32),
            logprobs=-random.random(output, np.float32),
            weight_spans=(WeightSpan("1", 0, output // 2), WeightSpan("2", output // 2, output)),
            routed_experts=random.integers(0, 128, (tokens - 1, layers, topk), np.uint8) if layers else None,
        )
        for index in range(count)
    ]


# --- as it is done by hand ---


def columns_in_lists(sample: Sample) -> dict[str, Any]:
    """One sample's tokens as Python lists, as they come out of JSON."""
    made = len(sample.output_ids)
    prompt = len(sample.tokens) - made
    versions = [int(span.version or 0) - 1 for span in sample.weight_spans for _ in range(span.end - span.start)]
    return {
        "input_ids": sample.tokens.tolist(),
        "position_ids": list(range(prompt + made)),
        "loss_mask": [False] * prompt + [True] * made,
        "logprobs": [0.0] * prompt + ([] if sample.logprobs is None else sample.logprobs.tolist()),
        "versions": [-1] * prompt + versions,
    }


def columns_in_arrays(sample: Sample) -> dict[str, Any]:
    """The same in numpy."""
    made, none = len(sample.output_ids), np.zeros(0, np.float32)
    prompt = len(sample.tokens) - made
    spans = [np.full(span.end - span.start, int(span.version or 0) - 1) for span in sample.weight_spans]
    logprobs = none if sample.logprobs is None else sample.logprobs
    return {
        "input_ids": sample.tokens.astype(np.int64),
        "position_ids": np.arange(prompt + made),
        "loss_mask": np.arange(prompt + made) >= prompt,
        "logprobs": np.concatenate([np.zeros(prompt, np.float32), logprobs]),
        "versions": np.concatenate([np.full(prompt, -1), *spans]).astype(np.int32),
    }


def tensors_of(sample: Sample, columns: Callable[[Sample], dict[str, Any]], make: Callable[[Any], Any]) -> Batch:
    """One sample, a tensor for each field."""
    found = {name: make(values) for name, values in columns(sample).items()}
    found["versions"] = found["versions"].to(torch.int32)
    if sample.routed_experts is not None:
        found["routed_experts"] = torch.from_numpy(np.pad(sample.routed_experts, [(0, 1), (0, 0), (0, 0)]))
    return found


def padded_by_hand(each: Sequence[Batch]) -> Batch:
    """Tensors of all samples, padded together."""
    whole = {name: pad_sequence([one[name] for one in each], batch_first=True) for name in each[0]}
    ones = [torch.ones(len(one["input_ids"]), dtype=torch.int64) for one in each]
    return {**whole, "attention_mask": pad_sequence(ones, batch_first=True)}


def packed_by_hand(each: Sequence[Batch]) -> Batch:
    """Tensors of all samples, behind each other."""
    whole = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    ends = torch.tensor([0, *(len(one["input_ids"]) for one in each)]).cumsum(0)
    return {**whole, "cu_seqlens": ends.to(torch.int32)}


def batch_of(form: str, who: str, samples: Sequence[Sample]) -> Batch:
    """``form`` is "collate" or "pack", ``who`` "ours", "lists" or "arrays"."""
    if who == "ours":
        batch: Any = collate(samples, pad_token_id=0) if form == "collate" else pack(samples)
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    columns, make = (columns_in_lists, torch.tensor) if who == "lists" else (columns_in_arrays, torch.from_numpy)
    each = [tensors_of(sample, columns, make) for sample in samples]
    return padded_by_hand(each) if form == "collate" else packed_by_hand(each)


# --- measuring ---


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Seconds, and megabytes beyond the process that holds the samples: of the batch, and at most."""
    form, who = spec["form"], spec["who"]
    samples = samples_of(spec["samples"], spec["tokens"], spec["layers"], spec["topk"])
    batch_of(form, who, samples_of(2, 16, spec["layers"], spec["topk"]))  # what is only done once, is done now
    idle = trimmed_bytes()
    forget_peak()
    began, used = time.perf_counter(), cpu_s()
    batch = batch_of(form, who, samples)
    wall, cpu = time.perf_counter() - began, cpu_s() - used
    peak = memory_bytes("VmHWM") - idle
    size = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    return {
        "wall_ms": 1e3 * wall,
        "cpu_ms": 1e3 * cpu,
        "batch_mb": size / MB,
        "peak_mb": peak / MB,
        "over_percent": 100.0 * (peak / size - 1.0),
    }


if __name__ == "__main__":
    answer_spec(measure)
