"""Strictly on-policy reinforcement learning of language models, from Python: docs/python.md.

    run = async_rl.train(model="model", data=rows, reward=score, out="runs/mine", train={"iterations": 5})
    for record in run:
        print(record["reward_mean"])

Importing it loads none of this: a name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl import errors
    from async_rl.api.evaluation import evaluate
    from async_rl.api.run import Run, open_run, train
    from async_rl.api.settings import Config

__version__ = "0.1.0"

_NAMES = {
    "Config": "async_rl.api.settings",
    "Run": "async_rl.api.run",
    "evaluate": "async_rl.api.evaluation",
    "open_run": "async_rl.api.run",
    "train": "async_rl.api.run",
}

__all__ = ["Config", "Run", "__version__", "errors", "evaluate", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("async_rl.errors")
    if name not in _NAMES:
        raise AttributeError(f"module 'async_rl' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
