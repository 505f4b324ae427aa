"""Policy, old policy, reference and teacher of one run, under one layout (arXiv 2511.18871, section 4.1).

The old policy is a separate model only if it differs from the policy: with one optimizer step per batch (`old_policy =
"reuse"`) its log-probs are the policy's own, detached, and it needs no forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from async_rl.checks.preflight.model import find_checkpoint, read_shape
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.shared.model_shape import ModelShape
from trainer.hf.adapters import start_adapters
from trainer.hf.weights import load_hf_weights
from trainer.model.gpt import RankModel, build_model
from trainer.parallel import Parallel
from trainer.policy.frozen_adapters import FrozenAdapters
from trainer.policy.frozen_model import FrozenModel

Frozen = FrozenModel | FrozenAdapters


@dataclass(frozen=True, slots=True)
class TriModel:
    """`policy` sums gradients into Megatron's fp32 buffers; a model whose log-probs are not needed is None."""

    policy: DistributedDataParallel
    old: Frozen | None
    reference: Frozen | None
    teacher: Frozen | None = None

    @property
    def frozen(self) -> list[Frozen]:
        """Those there are, in the order of their use."""
        return [model for model in (self.reference, self.old, self.teacher) if model is not None]

    @property
    def policy_model(self) -> RankModel:
        """The policy without its gradient buffers."""
        model: RankModel = self.policy.module
        return model

    @contextmanager
    def policy_to_score(self) -> Iterator[RankModel]:
        """The policy in evaluation mode and without gradients inside the context: nothing is recomputed."""
        model = self.policy_model
        model.eval()
        try:
            with torch.no_grad():
                yield model
        finally:
            model.train()


def load_tri_model(
    checkpoint: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    parallel: Parallel,
    section: TrainerSection,
    adapter: AdapterSection,
    *,
    needs_old: bool,
    needs_reference: bool,
    teacher: str | None = None,
    replays: bool = False,
) -> TriModel:
    """Loads all models from the same checkpoint, since training starts from the reference; but for the teacher.

    With adapters old policy and reference share the policy's weights: the reference is the base.

    Args:
        replays: policy and old policy, which stand for the sampler, take its routes; the others choose their own.
        teacher: checkpoint of a frozen model with the same vocabulary.

    Raises:
        ConfigError: a checkpoint's weights do not fit its config, or there is no such teacher.
    """
    policy = build_model(shape, dtype, parallel, section)
    load_hf_weights(policy, checkpoint)
    if adapter.is_given:
        start_adapters(policy, adapter)

    for chunk in policy.chunks:
        chunk.replays = replays

    def frozen_copy(*, is_base: bool) -> Frozen:
        if adapter.is_given:
            return FrozenAdapters(policy, keeps=not is_base)
        model = build_model(shape, dtype, parallel, section)
        model.load_state_dict(policy.state_dict())
        for chunk in model.chunks:
            chunk.replays = replays and not is_base
        return FrozenModel(model, section.frozen_weights, parallel.device.DEVICE)

    def load_teacher() -> FrozenModel:
        assert teacher is not None
        source = find_checkpoint(teacher)
        its_shape = read_shape(source, "algorithm.teacher")
        model = build_model(its_shape, dtype, parallel, section)
        load_hf_weights(model, source)
        return FrozenModel(model, section.frozen_weights, parallel.device.DEVICE)

    return TriModel(
        with_gradient_sums(policy, parallel, section),
        frozen_copy(is_base=False) if needs_old else None,
        frozen_copy(is_base=True) if needs_reference else None,
        load_teacher() if teacher is not None else None,
    )


def with_gradient_sums(model: RankModel, parallel: Parallel, section: TrainerSection) -> DistributedDataParallel:
    """The model with Megatron's fp32 buffers, in which gradients add up."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=parallel.shares_gradients
    )
    return DistributedDataParallel(model.config, config, model)
