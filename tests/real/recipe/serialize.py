"""Serializes a checkpoint as SGLang's own trainers do. Run by the kit's Python: serialize.py CHECKPOINT.

Writes one line of base64, then holds the shared memory that it names until its standard input ends.
"""
# torch and sglang live in the engine's environment, not in ours.
# mypy: ignore-errors

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

torch.multiprocessing.set_sharing_strategy("file_system")  # by name: file descriptors do not reach an unrelated process
tensors = list(load_file(Path(sys.argv[1]) / "model.safetensors").items())
sys.stdout.write(MultiprocessingSerializer.serialize(tensors, output_str=True) + "\n")
sys.stdout.flush()
sys.stdin.read()
