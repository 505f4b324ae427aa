"""The policy in training on Megatron-core: streamed groups in, one optimizer step per batch out.

Gradients are sums over the groups in the order in which they come, divided once by the whole batch's count: the loss of
a batch is known only when its last group is (invariant I4).

Shape legend: G responses of one group, N response tokens of one group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from async_rl.algorithms import make_algorithm
from async_rl.config import AlgorithmSection, ModelSection, OptimizerSection, RolloutSection, TrainerSection
from async_rl.errors import ConfigError
from async_rl.types import Group, GroupProof, StepStats
from async_rl.weight_stream import TensorSpec
from trainer.hf_checkpoint import save_hf_checkpoint
from trainer.hf_config import find_checkpoint, read_model_shape
from trainer.optimizer import PolicyOptimizer
from trainer.parallel import Parallel
from trainer.shared_prompt import GroupSlice, make_micro_batch
from trainer.tri_model import load_tri_model
from trainer.weight_export import hf_stream


class MegatronTrainer:
    """One rank of the training pool: every replica accumulates its share of a batch, all of them step together."""

    def __init__(
        self,
        parallel: Parallel,
        section: TrainerSection,
        model: ModelSection,
        rollout: RolloutSection,
        algorithm: AlgorithmSection,
        optimizer: OptimizerSection,
        num_iterations: int,
    ) -> None:
        """Loads the model named by `model.path`.

        Raises:
            ConfigError: there is no such checkpoint, or the trainer does not support it.
        """
        self._parallel = parallel
        self._temperature = rollout.temperature
        self._algorithm = make_algorithm(algorithm)
        self._checkpoint = find_checkpoint(model.path)
        shape = read_model_shape(self._checkpoint)
        dtype = getattr(torch, model.dtype)
        needs_reference = self._algorithm.needs_reference
        self._models = load_tri_model(self._checkpoint, shape, dtype, parallel, section, needs_reference)
        self._optimizer = PolicyOptimizer(optimizer, num_iterations, self._models.policy)
        self._vocab_size = shape.vocab_size
        self._sums: dict[str, float] = {}

    def accumulate(self, group: Group) -> GroupProof:
        """Adds one group's gradient to the batch's and returns its ledger row.

        Raises:
            ConfigError: a token id lies outside the model's vocabulary.
        """
        self._check_vocabulary(group)
        device = self._parallel.device.DEVICE
        micro_batch = make_micro_batch([GroupSlice.whole(group)], device)
        ref_logprobs_N = None
        if self._models.reference is not None:
            with torch.no_grad():
                ref_logprobs_N, _ = self._models.reference(micro_batch, self._temperature)
        advantages_G = self._algorithm.advantages(torch.tensor(group.rewards, dtype=torch.float32, device=device))
        with self._models.policy.no_sync():
            logprobs_N, _ = self._models.policy(micro_batch, self._temperature)
            # One step per batch: the policy that sampled is the policy that trains.
            old_logprobs_N = logprobs_N.detach()
            loss_sum = self._algorithm.loss_sum(
                logprobs_N, old_logprobs_N, ref_logprobs_N, advantages_G, micro_batch.labels.lengths_G
            )
            loss_sum.loss.backward()
        _add(
            self._sums,
            {"loss": float(loss_sum.loss.detach()), "count": loss_sum.count, "tokens": group.num_response_tokens}
            | {f"metric/{name}": float(value) for name, value in loss_sum.metrics.items()},
        )
        return GroupProof.of(group, _max_logprob_gap(group, old_logprobs_N))

    def optimizer_step(self) -> StepStats:
        """Ends the batch: one all-reduce of the gradient sums, one division, clip, step; waits for all replicas.

        Raises:
            NonFiniteGradient: the gradient has an infinity or NaN; no step was taken.
        """
        sums: dict[str, float] = {}
        for part in self._parallel.gather_json(self._sums):
            _add(sums, part)
        assert sums.get("count", 0) > 0, "optimizer_step() without an accumulated group"
        policy = self._models.policy
        finalize_model_grads([policy])
        policy.scale_gradients(1.0 / sums["count"])
        grad_norm, learning_rate = self._optimizer.step()
        self.discard()
        metrics = {
            name.removeprefix("metric/"): value / sums["tokens"]
            for name, value in sums.items()
            if name.startswith("metric/")
        }
        return StepStats(sums["loss"] / sums["count"], grad_norm, learning_rate, metrics)

    def discard(self) -> None:
        """Drops what has been accumulated since the last step."""
        self._models.policy.zero_grad_buffer()
        self._sums.clear()

    def weights(self) -> tuple[list[TensorSpec], Iterator[tuple[TensorSpec, torch.Tensor]]]:
        """The policy's weights under Hugging Face names, to be consumed before the next step."""
        return hf_stream(self._models.policy_model)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        """The rows of all replicas, replica by replica; waits for each of them to finish its share."""
        gathered = self._parallel.gather_json([asdict(row) for row in rows])
        return [_row_from_json(row) for part in gathered for row in part]

    def save_hf(self, path: Path) -> None:
        """Writes the policy as a Hugging Face checkpoint to `path`; only the main rank does, the others return."""
        if self._parallel.is_main:
            save_hf_checkpoint(self._models.policy_model, self._checkpoint, path)

    def _check_vocabulary(self, group: Group) -> None:
        highest = max(max(response.token_ids, default=0) for response in group.responses)
        highest = max(highest, *group.prompt.token_ids)
        if highest >= self._vocab_size:
            raise ConfigError(
                f"group {group.index} (prompt {group.prompt.prompt_id!r}) has token id {highest}, but the model's "
                f"vocabulary ends at {self._vocab_size - 1}: prompts and instances must use its tokenizer"
            )


def _add(sums: dict[str, float], part: Mapping[str, float]) -> None:
    for name, value in part.items():
        sums[name] = sums.get(name, 0.0) + value


def _max_logprob_gap(group: Group, logprobs_N: torch.Tensor) -> float:
    """Largest |trainer - rollout| log-prob in nats; logprobs_N are the trainer's."""
    rollout = [logprob for response in group.responses for logprob in response.logprobs]
    assert len(rollout) == len(logprobs_N), f"group {group.index}: {len(rollout)} logprobs, {len(logprobs_N)} tokens"
    return float((logprobs_N - torch.tensor(rollout, device=logprobs_N.device)).abs().max())


def _row_from_json(row: dict[str, Any]) -> GroupProof:
    return GroupProof(**row | {"versions": tuple(row["versions"]), "rewards": tuple(row["rewards"])})
