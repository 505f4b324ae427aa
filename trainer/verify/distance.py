"""`python -m trainer.verify.distance FIRST SECOND START`: how far two checkpoints are from each other, as JSON.

For `async-rl verify`, where their files are not equal. START is the checkpoint from which both were trained. Tensors
are read one by one; figures are over all weights that START has, too: `rms` of FIRST - SECOND and `largest`, of
SECOND - START `rms_of_change`, of SECOND `rms_of_weights`.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from async_rl.checks.preflight.model import find_checkpoint


class Tensors:
    """The tensors of a checkpoint, by name."""

    def __init__(self, checkpoint: Path) -> None:
        self._files = {name: file for file in sorted(checkpoint.glob("*.safetensors")) for name in _names(file)}

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.double()


def distance(first: Path, second: Path, start: Path) -> Mapping[str, float]:
    """See the module; a weight that is not a finite number makes the figures nan."""
    a, b, origin = (Tensors(path) for path in (first, second, start))
    assert a.names == b.names, "checkpoints of one model have the same tensors"
    names = [name for name in a.names if name in origin.names]
    num, different, squares, of_change, of_weights, largest = 0, 0, 0.0, 0.0, 0.0, 0.0
    for name in names:
        own, other = a.read(name), b.read(name)
        gap = own - other
        num += gap.numel()
        different += int((gap != 0).sum())
        squares += float(gap.square().sum())
        largest = max(largest, float(gap.abs().max()))
        of_change += float((other - origin.read(name)).square().sum())
        of_weights += float(other.square().sum())
    count = max(num, 1)
    return {
        "num_weights": num,
        "num_different": different,
        "largest": largest,
        "rms": math.sqrt(squares / count),
        "rms_of_change": math.sqrt(of_change / count),
        "rms_of_weights": math.sqrt(of_weights / count),
    }


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


if __name__ == "__main__":
    print(json.dumps(distance(Path(sys.argv[1]), Path(sys.argv[2]), find_checkpoint(sys.argv[3]))))
