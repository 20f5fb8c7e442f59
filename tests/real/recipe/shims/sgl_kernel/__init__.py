"""A stand-in for SGLang's kernels: everything can be imported from it, nothing can be called.

SGLang's CPU engine imports names from `sgl_kernel` and its submodules at start, whichever backend it then uses. With
the torch backends none of them runs; one that did would say so instead of computing something wrong.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn


class Kernel:
    """A name that was imported; calling it is the mistake."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> "Kernel":
        return kernel(self.__name__, attribute)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is a stand-in: this server must run on the torch backends")


def kernel(owner: str, attribute: str) -> Kernel:
    """Names a kernel of `owner`; dunder attributes stay absent, as Python's own probing expects."""
    if attribute.startswith("__"):
        raise AttributeError(f"{owner} has no {attribute}")
    return Kernel(f"{owner}.{attribute}")


class Submodules(MetaPathFinder, Loader):
    """Makes any `sgl_kernel.x.y` importable."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Claims what lies below this package."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        """Gives the empty module its made-up names."""
        name = module.__name__
        module.__getattr__ = lambda attribute: kernel(name, attribute)  # type: ignore[method-assign]


def __getattr__(attribute: str) -> Kernel:
    return kernel(__name__, attribute)


sys.meta_path.append(Submodules())
