"""What has to hold on an NVIDIA GPU; without one only the tests that need none run."""

import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from tests.support import ROOT
from tests.support.devices.attention_inputs import SHAPES, make_inputs, make_segments
from tests.support.devices.step_worker import train_step
from tests.support.tiers import at_night
from trainer.attention.shared_attention import checked_kernel, shared_prompt_attention
from trainer.devices import choose_device, cuda
from trainer.parallel import Parallel

CUDA = torch.device("cuda")

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
bf16 = torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_missing_cuda_device_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device is 'cuda' but torch sees no CUDA device"):
        choose_device("cuda")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("build", "driver", "message"),
    [
        (None, "550.54.15", r"is no CUDA build; install one"),
        ("13.0", "550.54.15", r"CUDA 13\.0, which needs a driver of version 580 .*driver is 550\.54\.15: .*cu126"),
        ("13.0", "580.65.06", r"driver is 580\.65\.06: check CUDA_VISIBLE_DEVICES"),
        ("13.0", None, r"built for CUDA 13\.0, and nvidia-smi names no driver"),
    ],
)
def test_the_likely_cause_of_a_missing_device_is_named(
    build: str | None, driver: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {driver}\n" if driver else "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(ConfigError, match=message):
        cuda.prepare()


@pytest.mark.parametrize(("num_devices", "message"), [(0, "sees 0 CUDA"), (2, "local rank 2, but torch sees 2 CUDA")])
def test_rank_without_a_gpu_of_its_own_is_refused(
    num_devices: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(cuda, "DEVICE", torch.device("cuda", 2))
    with pytest.raises(ConfigError, match=message):
        cuda.prepare()


@pytest.mark.parametrize("missing", [None, "triton", "cc", "Python.h"])
def test_models_are_compiled_only_where_triton_can_build_its_launchers(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("triton.py", "cc", "Python.h"):
        if missing != Path(name).stem and missing != name:
            (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert cuda.has_compiler() == (missing is None)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, atol=3e-2 * max(1.0, float(expected.abs().max())), rtol=0)


@pytest.mark.parametrize("heads", [(4, 4), (16, 8), (14, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", [pytest.param(shape, marks=on_gpu) for shape in SHAPES])
def test_cuda_kernel_gives_output_and_gradients_of_dense_attention(
    shape: str, heads: tuple[int, int], head_dim: int, rng: random.Random
) -> None:
    segments = make_segments(rng, shape, CUDA)
    inputs = [tensor.to(CUDA) for tensor in make_inputs(segments, bf16, heads, head_dim)]
    answers = []
    for kernel, dtype in ((cuda.ATTENTION, bf16), (None, torch.float32)):
        *qkv, dout = (tensor.to(dtype).requires_grad_() for tensor in inputs)
        out = shared_prompt_attention(*qkv, segments, head_dim**-0.5, kernel)
        answers.append([out.detach(), *torch.autograd.grad(out, qkv, dout.detach())])
    for actual, expected in zip(*answers, strict=True):
        near(actual, expected)


@pytest.mark.parametrize("dtype", [pytest.param(bf16, marks=on_gpu)])
def test_cuda_kernel_passes_the_check_on_first_use(dtype: torch.dtype) -> None:
    checked_kernel.cache_clear()
    assert checked_kernel(cuda, dtype, 16, 8, 128) is cuda.ATTENTION


@pytest.mark.distributed
@pytest.mark.parametrize("device", [at_night("cpu"), pytest.param("cuda", marks=on_gpu)])
def test_bf16_step_on_a_device_is_near_the_float32_step_on_cpu(device: str, parallel: Parallel) -> None:
    # In a process of its own: the CPU's substitutions in Megatron last as long as the process.
    command = [sys.executable, "-m", "tests.support.devices.step_worker", device]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stderr
    actual, expected = json.loads(answer.stdout), train_step(parallel, torch.float32)
    for name in ("before", "after"):
        torch.testing.assert_close(torch.tensor(actual[name]), torch.tensor(expected[name]), atol=0.1, rtol=0.02)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.03)
    changes = [abs(after - before) for before, after in zip(expected["before"], expected["after"], strict=True)]
    assert max(changes) > 0.5, "the step is too small to be seen beside the rounding of bf16"
