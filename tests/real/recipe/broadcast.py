"""A trainer's end of a weight group: joins as rank 0 and broadcasts a checkpoint, bucket by bucket, when it is told to.

Run by the kit's Python: broadcast.py PORT WORLD_SIZE GROUP CHECKPOINT BUCKETS. Writes one line of JSON, the buckets'
names, dtypes and shapes; another when it has joined; then reads a line for each bucket and broadcasts that.
"""
# torch and sglang live in the engine's environment, not in ours.
# mypy: ignore-errors

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.utils.common import init_custom_process_group


def tell(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


port, world_size, name, checkpoint, buckets = sys.argv[1:]
tensors = list(load_file(Path(checkpoint) / "model.safetensors").items())
parts = [tensors[number :: int(buckets)] for number in range(int(buckets))]
tell([[[key, str(tensor.dtype), list(tensor.shape)] for key, tensor in part] for part in parts])
group = init_custom_process_group(
    backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=int(world_size), rank=0, group_name=name
)
tell("joined")
for part, _ in zip(parts, sys.stdin, strict=False):
    for _, tensor in part:
        torch.distributed.broadcast(tensor.contiguous(), src=0, group=group)
    tell("sent")
