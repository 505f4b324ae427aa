"""Stands in for what MindSpeed core_r0.16.0 imports and the trainer has no use for, where it is not installed.

triton-ascend and torch_npu's torchair, which it decorates kernels and converters with; einops and scipy.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

NAMES = ("triton", "torchair", "einops", "scipy")


class _Anything:
    backend = "npu"

    def __call__(self, *args: Any, **_: Any) -> Any:
        """`@triton.jit` is the function, `@triton.autotune(...)` again a decorator."""
        return args[0] if len(args) == 1 and isinstance(args[0], FunctionType) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Module(ModuleType):
    __version__ = "3.2.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Modules(MetaPathFinder, Loader):
    """All of these names, and every module below them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Modules())
