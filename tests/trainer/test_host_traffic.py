"""A window of the trainer leaves the device running: nothing waits for it but the ledger rows, no copy blocks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from async_rl.method.types import Group
from tests.support.devices.fake_flash import FakeFlash
from tests.support.devices.host_traffic import HostTraffic
from trainer.devices import AttentionKernel, cpu
from trainer.devices.cuda_attention import CUDAAttention
from trainer.devices.layer_ops import LayerOps
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]


def model_tensors(trainer: MegatronTrainer) -> Iterator[torch.Tensor]:
    """What a trainer on a device has there before a window."""
    models = trainer.models
    if MoEAuxLossAutoScaler.main_loss_backward_scale is not None:
        yield MoEAuxLossAutoScaler.main_loss_backward_scale
    for buffer in (*models.policy.buffers, *models.policy.expert_parallel_buffers):
        yield buffer.grad_data
    for model in (models.policy_model, *(frozen._model for frozen in (models.old, models.reference) if frozen)):
        yield from (parameter.data for parameter in model.parameters())
        yield model.rotary_pos_emb.inv_freq


@dataclass(frozen=True, eq=False)
class Watched:
    """A device whose attention is the CUDA kernel, on the operators that PyTorch has for it, as documented."""

    ATTENTION: AttentionKernel
    LAYER_OPS: LayerOps = cpu.LAYER_OPS
    BACKEND: str = cpu.BACKEND
    DEVICE: torch.device = cpu.DEVICE
    MODEL_OPTIONS: dict[str, Any] = field(default_factory=lambda: cpu.MODEL_OPTIONS)

    def prepare(self) -> None:
        cpu.prepare()


@pytest.fixture
def traffic() -> HostTraffic:
    return HostTraffic()


@pytest.fixture
def device(traffic: HostTraffic) -> Watched:
    flash = FakeFlash((torch.float32,))
    kernels = (traffic.as_kernel(flash.forward), traffic.as_kernel(flash.backward))
    return Watched(CUDAAttention(*kernels, flash.dtypes))


def watch(traffic: HostTraffic, trainer: MegatronTrainer, run: Callable[[], object]) -> None:
    """Watches `run` in steady state: it has run once before."""
    run()
    traffic.put_on_device(model_tensors(trainer))
    with traffic.watch():
        run()


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        *(("qwen3", "ragged_groups"), ("qwen3", "rollout_groups")),
        *(("qwen3_moe", "ragged_groups"), ("qwen3_5_text", "ragged_groups")),
    ],
)
@pytest.mark.parametrize("micro_batch_tokens", [10_000, 14], ids=["packed", "two stages"])
@pytest.mark.parametrize(
    "options", [{"kl_coef": 0.0}, {"kl_coef": 0.1, "old_policy": "model"}], ids=["policy", "three models"]
)
def test_a_window_waits_once_for_its_ledger_rows(
    options: dict[str, object],
    micro_batch_tokens: int,
    family: str,
    groups: str,
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    traffic: HostTraffic,
    device: Watched,
) -> None:
    trainer = make_trainer(tiny_model(family), device=device, micro_batch_tokens=micro_batch_tokens, **options)
    some: list[Group] = request.getfixturevalue(groups)
    window = [[group] for group in some] if micro_batch_tokens == 14 else [some]
    watch(traffic, trainer, lambda: trainer.accumulate(window))
    assert traffic.mixed == []
    assert traffic.blocking_copies == []
    assert len(traffic.waits) == 1, traffic.waits


@pytest.mark.parametrize("groups", ["ragged_groups", "rollout_groups"])
def test_a_packed_micro_batch_is_uploaded_in_one_copy_and_its_advantages_in_another(
    groups: str,
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    traffic: HostTraffic,
    device: Watched,
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), device=device, kl_coef=0.1)
    some: list[Group] = request.getfixturevalue(groups)
    watch(traffic, trainer, lambda: trainer.accumulate([some]))
    # The two parts of attention have the offsets of their sequences besides.
    assert len(traffic.uploads) == 2 + 2, traffic.uploads
    assert all("host_copies.py" in upload for upload in traffic.uploads)


def test_a_window_without_experts_sorts_nothing(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    traffic: HostTraffic,
    device: Watched,
) -> None:
    """On a device `index_put` with accumulation sorts its indices, and so does the gradient of indexing by a tensor."""
    trainer = make_trainer(tiny_model("qwen3"), device=device, kl_coef=0.1)
    watch(traffic, trainer, lambda: trainer.accumulate([ragged_groups]))
    assert "aten.scatter_add_.default" in traffic.kernels
    assert not [kernel for kernel in traffic.kernels if "index_put" in kernel or "sort" in kernel]


def test_scoring_waits_once_and_computes_no_entropy(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    traffic: HostTraffic,
    device: Watched,
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), device=device)
    group = ragged_groups[0]
    responses = [response.token_ids for response in group.responses]
    watch(traffic, trainer, lambda: trainer.score(group.prompt.token_ids, responses))
    assert (traffic.mixed, traffic.blocking_copies, len(traffic.waits)) == ([], [], 1), traffic.waits
    assert "aten.exp.default" not in traffic.kernels


def test_the_sums_of_a_step_reach_the_host_in_one_copy(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    traffic: HostTraffic,
    device: Watched,
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), device=device, kl_coef=0.1)
    traffic.put_on_device(model_tensors(trainer))
    with traffic.watch():
        for group in ragged_groups:
            trainer.accumulate([[group]])
        waits = len(traffic.waits)
        trainer._sums.totals()
    assert len(traffic.waits) == waits + 1


def test_what_waits_for_a_device_is_counted(traffic: HostTraffic) -> None:
    values, host = torch.arange(4.0), torch.arange(4)
    traffic.put_on_device([values])
    with traffic.watch():
        _ = values.sum().item(), values.tolist(), bool((values > 1).any()), values[values > 1], values.nonzero()
        _ = host.tolist(), host.sum().item(), torch.zeros(3).tolist()
        assert len(traffic.waits) == 5, traffic.waits
        host.to(torch.device("cpu"), non_blocking=True)
        assert (len(traffic.uploads), traffic.blocking_copies) == (1, [])
        host.to(torch.device("cpu"))
        torch.tensor([1.0], device="cpu")
        assert len(traffic.blocking_copies) == 2
        _ = values + host
        assert len(traffic.mixed) == 1
