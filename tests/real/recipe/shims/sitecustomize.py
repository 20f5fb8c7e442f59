"""Lets SGLang start on a machine without a GPU; Python imports this first in every process that has it on PYTHONPATH.

Two things stand in the way once CPU torch is loaded. torchvision comes as a CUDA build whose operators cannot load, and
it then trips over the absent schema of `nms`. And the host buffer of routed experts is pinned through the CUDA runtime
even on a CPU. Both are settled in the moment torch has been imported, so no process pays for torch that needs none.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

OPERATORS = ("nms", "qnms")
KEPT_ALIVE: list[object] = []


class NoCudaRuntime:
    """Answers success to the two calls that pin and unpin host memory."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        """Leaves the memory pageable."""
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        """Has nothing to undo."""
        return 0


def adapt(torch: ModuleType) -> None:
    """Declares torchvision's schemas and takes the CUDA runtime out of the way."""
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT_ALIVE.append(library)
    torch.cuda.cudart = NoCudaRuntime


class AfterTorch(MetaPathFinder):
    """Finds torch as usual, and adapts it right after its code has run."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Steps in for torch alone."""
        if fullname != "torch" or self._looking:
            return None
        self._looking = True
        try:
            return self._hooked(find_spec("torch"))
        finally:
            self._looking = False

    def _hooked(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_adapt(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            adapt(module)

        spec.loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorch())
