"""An audit of real vLLM. One server stays as it is, and the audit's checkpoint is the one that is otherwise: what the
server does otherwise than that checkpoint is the fault."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.records.findings import Finding, all_hold
from tests.support.running_instance import Instance
from trainer.audit.audit import audit
from trainer.audit.given import Options

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

TOKEN = "s3cret"
Tensors = dict[str, torch.Tensor]


def _exchanged(tensors: Tensors, first: str, second: str) -> None:
    for name in [name for name in tensors if first in name]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _moved(tensors: Tensors, part: str = "", *, others: bool = False) -> None:
    """Tensors with `part` in their names, or all but these, are some 5% otherwise."""
    generator = torch.Generator().manual_seed(1)
    for name in sorted(tensors):
        if (part in name) is not others:
            tensors[name] = tensors[name] * (1 + 0.05 * torch.randn(tensors[name].shape, generator=generator))


@dataclass(frozen=True, slots=True)
class Case:
    """What the checkpoint has otherwise. `old`: the server has these tensors of the step before, "" for all of them."""

    cause: str
    change: Callable[[Tensors], None] = lambda tensors: None
    config: Mapping[str, Any] = field(default_factory=dict)
    old: str | None = None


CASES = {
    "all old": Case("stale every tensor", _moved, old=""),
    "one layer old": Case("stale model.layers.1", lambda t: _moved(t, ".layers.1."), old=".layers.1."),
    "one class old": Case("stale down", lambda t: _moved(t, "down_proj"), old="down_proj"),
    "gate and up exchanged": Case("gate and up exchanged", lambda t: _exchanged(t, "gate_proj", "up_proj")),
    "k and v exchanged": Case("k and v exchanged", lambda t: _exchanged(t, "k_proj", "v_proj")),
    "another rope theta": Case(
        "rope theta 10000", config={"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}
    ),
    "rope scaling dropped": Case(
        "rope scaling ignored",
        config={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
}


def _copy(model: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture
def findings(request: pytest.FixtureRequest, vllm: Instance, vllm_model: Path, tmp_path: Path) -> list[Finding]:
    case: Case = request.param
    checkpoint = _copy(vllm_model, tmp_path / "checkpoint", case.change)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **case.config}))
    before, old = None, case.old
    if old is not None:
        before = _copy(vllm_model, tmp_path / "before", lambda tensors: _moved(tensors, old, others=True))
    return audit(Options(vllm.url, str(checkpoint), dtype="float32", before=before, token=TOKEN))[1]


@pytest.mark.parametrize("findings", [Case("")], indirect=True)
def test_a_sound_vllm_has_no_fault(findings: list[Finding]) -> None:
    assert all_hold(findings), findings
    of_text = {finding.check: finding.outcome for finding in findings}
    assert of_text["tokens of a text"] == of_text["tokens of a chat"] == "holds"


@pytest.mark.parametrize(
    ("findings", "cause"), [(case, case.cause) for case in CASES.values()], ids=list(CASES), indirect=["findings"]
)
def test_a_fault_of_vllm_is_named(findings: list[Finding], cause: str) -> None:
    assert next(finding.cause for finding in findings if finding.outcome == "fails") == cause, findings
