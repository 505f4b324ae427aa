"""Policy, old policy and reference of one run, under one layout on the same ranks (arXiv 2511.18871, section 4.1).

The old policy is a separate model only if it differs from the policy: with one optimizer step per batch (`old_policy =
"reuse"`) its log-probs are the policy's own, detached, and it needs no forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from async_rl.config.sections import TrainerSection
from trainer.hf.weights import load_hf_weights
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.model.shape import ModelShape
from trainer.parallel import Parallel
from trainer.policy.frozen_model import FrozenModel


@dataclass(frozen=True, slots=True)
class TriModel:
    """`policy` sums gradients into Megatron's fp32 buffers; a model whose log-probs are not needed is None."""

    policy: DistributedDataParallel
    old: FrozenModel | None
    reference: FrozenModel | None

    @property
    def policy_model(self) -> SharedPromptGPT:
        """The policy without its gradient buffers."""
        model: SharedPromptGPT = self.policy.module
        return model

    @contextmanager
    def policy_to_score(self) -> Iterator[SharedPromptGPT]:
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
    *,
    needs_old: bool,
    needs_reference: bool,
) -> TriModel:
    """Loads all models from the same checkpoint: training starts from the reference.

    Raises:
        ConfigError: the checkpoint's weights do not fit its config, or the layout does not fit the model.
    """
    policy = build_model(shape, dtype, parallel, section)
    load_hf_weights(policy, checkpoint)

    def frozen_copy() -> FrozenModel:
        model = build_model(shape, dtype, parallel, section)
        model.load_state_dict(policy.state_dict())
        return FrozenModel(model, section.frozen_weights, parallel.device.DEVICE)

    old = frozen_copy() if needs_old else None
    reference = frozen_copy() if needs_reference else None
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=section.shares_optimizer(parallel.num_replicas)
    )
    return TriModel(DistributedDataParallel(policy.config, ddp_config, policy), old, reference)
