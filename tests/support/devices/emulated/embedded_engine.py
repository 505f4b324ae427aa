"""Lets the embedded engine run on emulated NPUs; the product refuses `--device npu` without vLLM.

Python imports it at the start of every program of `emulated_environment`. It changes two modules when they are
imported: `deploy.cluster.plan` and `inference_service.options`.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

REFUSALS = {"deploy.cluster.plan": "require_engine_for_device", "inference_service.options": "_require_possible"}


class _WithoutRefusals(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in REFUSALS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            assert hasattr(module, REFUSALS[name])
            setattr(module, REFUSALS[name], lambda *_: None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WithoutRefusals())
