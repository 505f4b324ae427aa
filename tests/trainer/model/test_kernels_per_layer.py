"""How many kernels a layer starts on a device, forward and backward: small layers are as fast as their launches."""

from dataclasses import replace

import pytest
import torch

from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from async_rl.shared.model_parts import Experts
from async_rl.shared.model_shape import ModelShape
from tests.support.devices.fake_flash import FakeFlash
from tests.support.devices.host_traffic import HostTraffic
from tests.trainer.devices.test_npu_model import DENSE, WITH_EXPERTS
from tests.trainer.test_host_traffic import Watched
from trainer.batching.group_slice import slices_of
from trainer.batching.shared_prompt import make_micro_batch
from trainer.devices.cuda_attention import CUDAAttention
from trainer.model.gpt import build_model
from trainer.parallel import Parallel

DENSE_LAYER = 150
"""About 75 of four norms, which a device with a fused one computes in two each; 24 of the rotary embedding of queries
and keys; 20 of attention (two flash calls each way, the merge of their results, copies); 12 products of four linear
layers; the rest is SwiGLU, residuals and sums of gradients."""

EXPERTS_LAYER = DENSE_LAYER + 40
"""Besides, routing, sorting rows by expert and back; the products are six, each for all experts."""


def kernels_of(shape: ModelShape, parallel: Parallel, groups: list[Group]) -> int:
    traffic = HostTraffic()
    flash = FakeFlash((torch.float32,))
    kernels = (traffic.as_kernel(flash.forward), traffic.as_kernel(flash.backward))
    device = Watched(CUDAAttention(*kernels, flash.dtypes))
    model = build_model(shape, torch.float32, replace(parallel, device=device), TrainerSection())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    traffic.put_on_device([*model.parameters(), model.rotary_pos_emb.inv_freq])
    with traffic.watch():
        logprobs_N, *_ = model(make_micro_batch(slices_of(groups), device.DEVICE), 1.0)
        logprobs_N.sum().backward()
    assert traffic.mixed == traffic.waits == traffic.blocking_copies == []
    return len(traffic.kernels)


def kernels_per_layer(shape: ModelShape, parallel: Parallel, groups: list[Group]) -> int:
    one, two = (kernels_of(replace(shape, num_layers=n), parallel, groups) for n in (1, 2))
    return two - one


@pytest.mark.parametrize(("shape", "limit"), [(DENSE, DENSE_LAYER), (WITH_EXPERTS, EXPERTS_LAYER)], ids=str)
def test_a_layer_starts_few_kernels(
    shape: ModelShape, limit: int, parallel: Parallel, ragged_groups: list[Group]
) -> None:
    assert kernels_per_layer(shape, parallel, ragged_groups) <= limit


def test_more_experts_and_groups_start_no_more_kernels(parallel: Parallel, ragged_groups: list[Group]) -> None:
    many = replace(WITH_EXPERTS, experts=Experts(64, 2, 24, renormalized=True))
    few = kernels_per_layer(WITH_EXPERTS, parallel, ragged_groups[:1])
    assert kernels_per_layer(many, parallel, ragged_groups) == few
