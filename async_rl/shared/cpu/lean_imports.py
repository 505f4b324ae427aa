"""Spares trainer and embedded engine what torch 2.13 and transformers 5.23 load or do at import without being used.

Called by their entry points. Each substitution can go when the import that it shortens no longer needs it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers.utils import import_utils

_COMPILER = "torch._dynamo"


def scan_models_once() -> None:
    """Imports `transformers.models` with the list of its files that transformers made for itself.

    transformers reads all files of its models, and keeps what it found under the path of their folder. Its package of
    models asks again, under the path of a file in it, and the folders below are too many for the cache: it would read
    all of them once more, half a second.
    """
    scan = import_utils.create_import_structure_from_path
    folder = Path(transformers.__file__).parent / "models"

    def scan_or_known(path: str | Path) -> Any:
        return scan(folder if Path(path) == folder / "__init__.py" else path)

    import_utils.create_import_structure_from_path = scan_or_known  # type: ignore[assignment]  # a substitution
    try:
        import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = scan


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
