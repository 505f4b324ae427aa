"""The NPU's layer operations, and what `prepare` finds missing; tests that need an NPU are skipped without one."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from tests.support.devices.attention_inputs import SHAPES, make_inputs, make_segments
from tests.support.devices.fake_torch_npu import FakeTorchNPU
from trainer.attention.shared_attention import shared_prompt_attention
from trainer.devices import choose_device, layer_ops, npu
from trainer.devices.npu_ops import NPUOps

on_npu = [pytest.mark.npu, pytest.mark.skipif(find_spec("torch_npu") is None, reason="needs torch_npu")]

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


def test_npu_swiglu_of_experts_without_rows_is_empty_and_has_a_gradient() -> None:
    x = torch.empty(0, 6, requires_grad=True)
    y = OPS.swiglu(x)
    assert y.shape == (0, 3)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


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
    installed(**{"torch-npu": "2.6.0.post4"})
    with pytest.raises(ConfigError, match=r"torch [0-9.]+ and torch_npu 2\.6\.0\.post4 are not a pair"):
        npu.require_versions()


@pytest.mark.parametrize("suffix", [".post2", "+git5c1f6a8"])
def test_megatron_of_another_series_is_refused(suffix: str, installed: Callable[..., None]) -> None:
    pair = {"torch-npu": torch.__version__.split("+")[0] + suffix}
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


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For a process that finds a torch_npu with two devices and a MindSpeed, which print what they see."""
    for path, text in {
        "torch_npu.py": (
            "class npu:\n"
            "    device_count = staticmethod(lambda: 2)\n"
            "    set_device = staticmethod(lambda index: print('set_device', index))\n"
        ),
        "mindspeed/megatron_adaptor.py": (
            "import sys\n"
            "print('mindspeed', sys.argv[1:], [name for name in sys.modules if name.startswith('megatron')])\n"
        ),
        "torch_npu-0.dist-info/METADATA": f"Name: torch-npu\nVersion: {torch.__version__.split('+')[0]}.post1\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def prepare(environment: dict[str, str], before: str = "") -> "subprocess.CompletedProcess[str]":
    program = f"{before}\nfrom trainer.devices import choose_device; choose_device('npu'); choose_device('npu')"
    command = [sys.executable, "-c", program, "config.toml", "--num-layers", "4"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.distributed
def test_prepare_takes_the_npu_of_this_rank_and_then_mindspeed_before_megatron(environment: dict[str, str]) -> None:
    answer = prepare(environment | {"LOCAL_RANK": "1"})
    assert answer.stdout.splitlines() == ["set_device 1", "mindspeed [] []"], answer.stderr


@pytest.mark.distributed
def test_rank_without_an_npu_of_its_own_is_refused(environment: dict[str, str]) -> None:
    answer = prepare(environment | {"LOCAL_RANK": "2"})
    assert "ConfigError: trainer.device is 'npu' and this is local rank 2, but torch_npu sees 2 NPU(s)" in answer.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import triton.language",
            "mindspeed.megatron_adaptor cannot be imported, since it imports 'triton', which is not installed: install "
            "triton-ascend (`pip install triton-ascend==3.2.0`)",
        ),
        pytest.param(
            "import no_such.part",
            "since it imports 'no_such', which is not installed: install the package that has no_such",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import mindspeed.no_such",
            "there is no module mindspeed.no_such: install branch core_r0.16.0",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "raise ImportError('odd')",
            "mindspeed.megatron_adaptor cannot be imported (odd): install branch core_r0.16.0",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_mindspeed_lacks_is_named(text: str, message: str, environment: dict[str, str]) -> None:
    (Path(environment["PYTHONPATH"]) / "mindspeed/megatron_adaptor.py").write_text(text)
    answer = prepare(environment)
    assert answer.returncode != 0 and message in answer.stderr, answer.stderr


@pytest.mark.distributed
def test_mindspeed_that_comes_too_late_is_our_own_mistake(environment: dict[str, str]) -> None:
    answer = prepare(environment, before="import sys; sys.modules['megatron.core'] = sys")
    assert "AssertionError: megatron.core was imported before the NPU was prepared" in answer.stderr


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=on_npu) for shape in SHAPES])
def test_npu_kernel_gives_output_and_gradients_of_dense_attention(shape: str, rng: random.Random) -> None:
    device = torch.device("npu")
    segments = make_segments(rng, shape, device)
    inputs = make_inputs(segments, torch.bfloat16, (16, 8), 128)
    answers = []
    for kernel, dtype in ((npu.ATTENTION, torch.bfloat16), (None, torch.float32)):
        *qkv, dout = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
        out = shared_prompt_attention(*qkv, segments, 128**-0.5, kernel)
        answers.append([out.detach(), *torch.autograd.grad(out, qkv, dout.detach())])
    for actual, expected in zip(*answers, strict=True):
        torch.testing.assert_close(actual.float(), expected, atol=3e-2 * max(1.0, float(expected.abs().max())), rtol=0)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=on_npu)])
def test_npu_layer_operations_are_the_reference(dtype: torch.dtype) -> None:
    real, x_THD = NPUOps(), torch.randn(7, 4, 128, dtype=dtype, device="npu")
    weight, angles_T1D = (
        torch.randn(128, dtype=dtype, device="npu"),
        torch.randn(7, 1, 64, device="npu").repeat(1, 1, 2),
    )
    cos_T1D, sin_T1D = angles_T1D.cos().to(dtype), angles_T1D.sin().to(dtype)
    first, second = x_THD.chunk(2, -1)
    for actual, expected in (
        (real.rms_norm(x_THD, weight, 1e-6), layer_ops.rms_norm(x_THD, weight, 1e-6)),
        (real.rotary(x_THD, cos_T1D, sin_T1D), layer_ops.rotary(x_THD, cos_T1D, sin_T1D)),
        (real.swiglu(x_THD), torch.nn.functional.silu(first) * second),
    ):
        torch.testing.assert_close(actual, expected, atol=5e-2, rtol=2e-2)
