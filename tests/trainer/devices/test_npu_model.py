"""A whole model on the NPU's attention and layer operations, as documented, against the CPU's."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from async_rl.shared.model_parts import Experts
from async_rl.shared.model_shape import ModelShape
from tests.support.devices.fake_torch_npu import FakeTorchNPU
from trainer.batching.group_slice import slices_of
from trainer.batching.shared_prompt import MicroBatch, make_micro_batch
from trainer.devices import AttentionKernel, cpu
from trainer.devices.layer_ops import LayerOps
from trainer.devices.npu_attention import NPUAttention
from trainer.devices.npu_ops import NPUOps
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.parallel import Parallel

DENSE = ModelShape(
    family="qwen3",
    num_layers=2,
    hidden_size=32,
    ffn_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=96,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope=None,
    tied=True,
)
WITH_EXPERTS = replace(DENSE, family="qwen3_moe", experts=Experts(4, 2, 24, renormalized=True))


@dataclass(frozen=True)
class NPUOnCPU:
    """The NPU's kernels on operators that compute on the CPU."""

    ATTENTION: AttentionKernel
    LAYER_OPS: LayerOps
    BACKEND: str = cpu.BACKEND
    DEVICE: torch.device = cpu.DEVICE
    MODEL_OPTIONS: dict[str, Any] = field(default_factory=lambda: cpu.MODEL_OPTIONS, hash=False)

    def prepare(self) -> None:
        cpu.prepare()


def npu_on_cpu() -> NPUOnCPU:
    torch_npu: Any = FakeTorchNPU()
    ops = NPUOps(torch_npu)
    return NPUOnCPU(
        NPUAttention(torch_npu),
        LayerOps(rms_norm=ops.rms_norm, rotary=ops.rotary, swiglu=ops.swiglu, grouped_linear=ops.grouped_linear),
    )


def answer(model: SharedPromptGPT, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and gradients of all weights."""
    logprobs, entropies, _ = model(micro_batch, 0.7)
    (logprobs * logprobs.detach().sin()).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logprobs": logprobs.detach(), "entropies": entropies, **gradients}


def answers(shape: ModelShape, parallel: Parallel, groups: list[Group], device: NPUOnCPU, recompute: str) -> Any:
    """Those of a model on `device`, and of the same on the CPU."""
    section = TrainerSection(recompute=recompute)
    expected_model = build_model(shape, torch.float32, parallel, section)
    with torch.no_grad():
        for name, parameter in expected_model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model = build_model(shape, torch.float32, replace(parallel, device=device), section)
    model.load_state_dict(expected_model.state_dict())
    assert model.kernel is device.ATTENTION
    micro_batch = make_micro_batch(slices_of(groups), cpu.DEVICE)
    return answer(model, micro_batch), answer(expected_model, micro_batch)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", [DENSE, WITH_EXPERTS], ids=["dense", "experts"])
def test_model_on_npu_operators_gives_the_same_logprobs_and_gradients(
    shape: ModelShape, recompute: str, parallel: Parallel, ragged_groups: list[Group]
) -> None:
    actual, expected = answers(shape, parallel, ragged_groups, npu_on_cpu(), recompute)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [DENSE, WITH_EXPERTS], ids=["dense", "experts"])
def test_model_with_the_fused_activation_of_cuda_gives_the_same(
    shape: ModelShape, parallel: Parallel, ragged_groups: list[Group]
) -> None:
    options = cpu.MODEL_OPTIONS | {"bias_activation_fusion": True}
    device = NPUOnCPU(cpu.ATTENTION, cpu.LAYER_OPS, MODEL_OPTIONS=options)
    actual, expected = answers(shape, parallel, ragged_groups, device, "none")
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
