"""The models of one run under one layout: the policy and, where the algorithm needs it, the frozen reference.

The old policy is the policy itself: with one optimizer step per batch its log-probs are the policy's own, detached.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from async_rl.config import TrainerSection
from trainer.hf_config import ModelShape
from trainer.hf_weights import load_hf_weights
from trainer.model import SharedPromptGPT, build_model
from trainer.parallel import Parallel


@dataclass(frozen=True, slots=True)
class TriModel:
    """`policy` sums gradients into Megatron's fp32 buffers; `reference` is None where nothing reads its log-probs."""

    policy: DistributedDataParallel
    reference: SharedPromptGPT | None

    @property
    def policy_model(self) -> SharedPromptGPT:
        """The policy without its gradient buffers."""
        return self.policy.module


def load_tri_model(
    checkpoint: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    parallel: Parallel,
    section: TrainerSection,
    needs_reference: bool,
) -> TriModel:
    """Loads policy and reference from the same checkpoint: training starts at the reference.

    Raises:
        ConfigError: the checkpoint's weights do not fit its config.
    """
    policy = build_model(shape, dtype, parallel, section)
    load_hf_weights(policy, checkpoint)
    reference = None
    if needs_reference:
        reference = build_model(shape, dtype, parallel, section).requires_grad_(False).eval()
        reference.load_state_dict(policy.state_dict())
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=section.distributed_optimizer
    )
    return TriModel(DistributedDataParallel(policy.config, ddp_config, policy), reference)
