"""Spares trainer and embedded engine torch's compiler, which torch 2.13 and transformers 5.23 load without using it.

Called by their entry points. It can go when the imports that it shortens no longer need it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"


@contextmanager
def without_compiler() -> Iterator[None]:
    """In its body no functions are marked for torch.compile: that would load torch's compiler, which nothing here uses.

    transformers marks functions where it defines them, torch some at their first call. In the body, an empty package is
    in the compiler's place, with these marks, which change nothing, and with its folder: what is imported from a file
    in it stays valid. The compiler itself is loaded where anything else of it is used, and can be imported afterwards.
    """
    spec = find_spec(_COMPILER)
    if _COMPILER in sys.modules or spec is None:
        yield
        return
    stand_in = _StandIn(_COMPILER)
    stand_in.__path__ = spec.submodule_search_locations or []
    sys.modules[_COMPILER] = vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """A decorator that changes nothing, with or without options."""
    return _unchanged if function is None else function


class _StandIn(ModuleType):
    """A package in the compiler's place, which leaves when anything but a mark is used."""

    allow_in_graph = assume_constant_result = disable = staticmethod(_unchanged)

    def __getattr__(self, name: str) -> Any:
        # Attributes of a package (`__spec__`, `__all__`), which it may lack.
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(import_module(_COMPILER), name)

    def leave(self) -> None:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER], vars(torch)["_dynamo"]
