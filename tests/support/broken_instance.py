"""The real inference service, broken in a named way inside: `broken_python` is an interpreter that starts it so.

Each instance takes the next fault of a list, and notes it by its port. What it reports of itself (version, fingerprint,
process) stays right, as with a real server that has the fault.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.shared.cpu.exact import block_masses
from inference_service.engine import sampling
from inference_service.weight_transfer.weight_update import WeightUpdate
from tests.support import ROOT
from tests.support.adapter_faults import ALONE, MERGED, AlonePlant, plant_merged

FACTOR = 0.7
"""Of the temperature that such an instance samples at, to the one that is asked for."""


PROGRAM = """#!{python}
import sys

sys.path.insert(0, {root!r})
from {module} import start

start({place!r}, *sys.argv[2:])
"""


def broken_python(directory: Path, faults: Sequence[str]) -> Path:
    """A program in place of Python, for `inference.python`; "" is an instance without a fault."""
    directory.mkdir()
    (directory / "faults.json").write_text(json.dumps(list(faults)))
    program = directory / "python"
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT), module=__name__, place=str(directory)))
    program.chmod(0o755)
    return program


def faults_by_url(directory: Path) -> dict[str, str]:
    """URL -> fault of the instances that were started."""
    return {f"http://127.0.0.1:{file.suffix[1:]}": file.read_text() for file in directory.glob("port.*")}


def _temperature() -> None:
    process = sampling._process

    def at_another(logits_RV: torch.Tensor, rows: Any) -> torch.Tensor:
        return process(logits_RV, rows) / FACTOR

    sampling._process = at_another


def _quiet_temperature() -> None:
    """Draws at another temperature, and reports log-probs of the right one."""
    draw = sampling._inverse_cdf

    def at_another(weights_RV: torch.Tensor, masses_RB: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
        sharper_RV = weights_RV ** (1 / FACTOR)
        return draw(sharper_RV, block_masses(sharper_RV), u_R)

    sampling._inverse_cdf = at_another


def _after_update(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    finish = WeightUpdate.finish

    def finish_and_change(self: WeightUpdate) -> None:
        finish(self)
        with torch.no_grad():
            for view in self._views.values():
                view.copy_(change(view))

    WeightUpdate.finish = finish_and_change  # type: ignore[method-assign]


def _after_load(change: Callable[[PreTrainedModel], None]) -> None:
    load = AutoModelForCausalLM.from_pretrained

    def load_and_change(*arguments: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel = load(*arguments, **options)
        change(model)
        return model

    AutoModelForCausalLM.from_pretrained = load_and_change  # type: ignore[assignment, method-assign]


def _weights() -> None:
    generator = torch.Generator().manual_seed(0)
    _after_update(lambda weight: weight * (1 + 0.1 * torch.randn(weight.shape, generator=generator)))


class _OldHead(torch.nn.Module):
    """A head that no weight update reaches."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._kept = [weight.detach().clone()]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._kept[0].to(hidden.device))


def _head() -> None:
    def keep(model: PreTrainedModel) -> None:
        model.lm_head = _OldHead(model.lm_head.weight)

    _after_load(keep)


def _dtype() -> None:
    """Weights, and what every layer gives to the next, as an engine in bfloat16 has them."""

    def round_outputs(model: PreTrainedModel) -> None:
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(lambda module, inputs, output: _rounded(output))

    _after_load(round_outputs)
    _after_update(lambda weight: weight.bfloat16().to(weight.dtype))


def _rounded(output: Any) -> Any:
    return output.bfloat16().to(output.dtype) if isinstance(output, torch.Tensor) else output


ALONE_FAULTS = {f"alone: {fault}": fault for fault in ALONE}
MERGED_FAULTS = {f"merged: {fault}": fault for fault in MERGED}

BREAK: dict[str, Callable[[], None]] = {
    **{name: AlonePlant(fault).in_all for name, fault in ALONE_FAULTS.items()},
    **{name: partial(plant_merged, fault) for name, fault in MERGED_FAULTS.items()},
    "temperature": _temperature,
    "quiet temperature": _quiet_temperature,
    "weights": _weights,
    "head": _head,
    "dtype": _dtype,
    "": lambda: None,
}


def _take_fault(directory: Path, port: str) -> str:
    """The next fault that no other instance has taken."""
    for number, fault in enumerate(json.loads((directory / "faults.json").read_text())):
        try:
            os.close(os.open(directory / f"taken.{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        (directory / f"port.{port}").write_text(fault)
        return str(fault)
    raise SystemExit("more instances than faults")


def start(place: str, program: str, *arguments: str) -> None:
    """The program `python -m program arguments`, with the next fault."""
    if "--check" not in arguments:
        BREAK[_take_fault(Path(place), arguments[arguments.index("--port") + 1])]()
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__")
