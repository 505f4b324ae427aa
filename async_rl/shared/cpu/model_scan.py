"""Spares every program that loads transformers 5.23 the second of two readings of all its models.

It can go when transformers reads them once, which tests/async_rl/shared/cpu/test_lean_imports.py would show.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils


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
