"""The NPU's layer operations, and what `prepare` finds missing; nothing here needs an NPU."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from async_rl.errors import ConfigError
from tests.trainer.devices.fake_torch_npu import FakeTorchNPU
from trainer import layer_ops
from trainer.devices import choose_device, npu
from trainer.devices.npu_ops import NPUOps

OPS = NPUOps(FakeTorchNPU())  # type: ignore[arg-type]


def both(
    ours: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of either function."""
    answers = []
    for function in (ours, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        answers.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    return answers[0], answers[1]


def test_npu_rms_norm_is_the_reference() -> None:
    torch.testing.assert_close(
        *both(
            lambda x, weight: OPS.rms_norm(x, weight, 1e-5),
            lambda x, weight: layer_ops.rms_norm(x, weight, 1e-5),
            torch.randn(7, 1, 3, 16),
            torch.randn(16),
        )
    )


def test_npu_rotary_is_the_reference() -> None:
    angles_T1D = torch.randn(7, 1, 8).repeat(1, 1, 2)
    inputs = torch.randn(7, 3, 16), angles_T1D.cos(), angles_T1D.sin()
    torch.testing.assert_close(*both(OPS.rotary, layer_ops.rotary, *inputs))


def test_npu_swiglu_gates_with_the_first_half() -> None:
    gate, up = torch.randn(5, 1, 6), torch.randn(5, 1, 6)
    x = torch.cat([gate, up], dim=-1)
    torch.testing.assert_close(OPS.swiglu(x), torch.nn.functional.silu(gate) * up)
    # Sequence parallelism hands over views.
    torch.testing.assert_close(OPS.swiglu(x.transpose(0, 1)), OPS.swiglu(x).transpose(0, 1))


def test_missing_torch_npu_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device is 'npu' but torch-npu is not installed"):
        choose_device("npu")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`installed(**{"torch-npu": "2.13.0"})`: what the package index of this environment says."""

    def set_versions(**versions: str) -> None:
        def version(package: str) -> str:
            if package not in versions:
                raise PackageNotFoundError(package)
            return versions[package]

        monkeypatch.setattr(npu, "version", version)

    return set_versions


def test_torch_npu_of_another_torch_is_refused(installed: Callable[..., None]) -> None:
    installed(**{"torch-npu": "2.7.1.post4"})
    with pytest.raises(ConfigError, match=r"torch [0-9.]+ and torch_npu 2\.7\.1\.post4 are not a pair"):
        npu.require_versions()


def test_megatron_of_another_series_is_refused(installed: Callable[..., None]) -> None:
    pair = {"torch-npu": torch.__version__.split("+")[0] + ".post2"}
    installed(**pair, **{"megatron-core": "0.17.1"})
    with pytest.raises(ConfigError, match=r"megatron-core is 0\.17\.1"):
        npu.require_versions()
    installed(**pair, **{"megatron-core": "0.16.1"})
    npu.require_versions()


def test_mindspeed_does_not_see_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["trainer", "config.toml", "--num-layers", "4"]
    monkeypatch.setattr(sys, "argv", arguments)
    with npu.bare_arguments():
        assert sys.argv == ["trainer"]
    assert sys.argv is arguments
