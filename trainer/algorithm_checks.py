"""What an algorithm needs of a run's settings, what it returns, and the groups that it trains, checked before they are.

For a user's own one, which no config knows; `check_algorithm` (`async_rl/method/algorithms/checking.py`) finds more,
without a run.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.pipeline import OF_TOKENS, SHAPED_REWARDS, TOKEN_REWARDS
from async_rl.config.pipeline_section import PipelineNode
from async_rl.config.train_section import TrainSection
from async_rl.errors import ConfigError
from async_rl.method.algorithms import Algorithm, LossSum, Needs, Responses, Rollouts, Tokens
from async_rl.method.algorithms.distillation import Distillation
from async_rl.method.algorithms.gdpo import GDPO
from async_rl.method.algorithms.policy_gradient import PolicyGradient
from async_rl.method.types import Group
from trainer.batching.group_slice import num_rows

ENTROPY = "entropy"
"""The metric that is recorded with every algorithm."""


def require_possible(needs: Needs, config: AlgorithmSection, train: TrainSection) -> None:
    """Checks that the config provides what an algorithm needs; of the built-in ones the config has been checked.

    Raises:
        ConfigError: it does not; names the setting.
    """
    if needs.totals and train.mode != "synchronous":
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs the totals of the whole batch before the first advantage, but "
            f"train.mode is {train.mode!r}: set it to 'synchronous'"
        )
    if needs.totals and needs.reward_kl:
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs the totals of the whole batch before the reference has scored "
            "the first rollout, and a KL in the reward: set algorithm.kl_in to 'loss'"
        )
    if needs.reward_kl and not needs.reference:
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs a KL in the reward, but no reference, which it is to: say so in "
            "its `needs`"
        )
    if needs.teacher and config.teacher is None:
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs a teacher, but algorithm.teacher is not set: name its checkpoint"
        )


def require_of_rollouts(algorithm: Algorithm, method: str, returned: torch.Tensor, group: Group) -> torch.Tensor:
    """Advantages or weights as they were returned, which must be one finite number per rollout.

    Raises:
        ConfigError: they are not.
    """
    size = len((group.whole or group).rewards)
    fits = isinstance(returned, torch.Tensor) and returned.shape == (size,) and bool(returned.isfinite().all())
    if not fits:
        _refuse(algorithm, f"{method}() of group {group.index}", returned, f"{size} finite numbers, float64 [{size}]")
    return returned


def require_nodes(algorithm: Algorithm, nodes: Sequence[PipelineNode]) -> None:
    """Checks what the config cannot know of a user's own algorithm: that it uses what nodes of the pipeline write.

    Raises:
        ConfigError: it does not.
    """
    writers = {node.written: node.name for node in nodes}
    kind, faults = type(algorithm).__name__, []
    needs = algorithm.needs
    of_tokens = [name for name in OF_TOKENS if name in writers]
    if of_tokens and (needs.values or needs.whole_groups or not _has_loss_of_tokens(algorithm)):
        faults += [(name, "has no place for numbers of tokens in its loss") for name in of_tokens]
    elif TOKEN_REWARDS in writers and getattr(algorithm, "scale_by_std", None) == "batch" and not needs.totals:
        faults.append((TOKEN_REWARDS, "divides by a deviation over the batch, these, too"))
    if SHAPED_REWARDS in writers and isinstance(algorithm, GDPO | Distillation):
        faults.append((SHAPED_REWARDS, "is not made of the whole reward"))
    for written, why in faults:
        raise ConfigError(
            f"pipeline.nodes {writers[written]!r} writes {written!r}, but algorithm {kind} {why}: leave the node out, "
            "or choose another algorithm"
        )


def _has_loss_of_tokens(algorithm: Algorithm) -> bool:
    """Whether its loss is that of `PolicyGradient`, and changes with the advantages and weights of tokens."""
    if not isinstance(algorithm, PolicyGradient) or type(algorithm).loss_sum is not PolicyGradient.loss_sum:
        return False
    zeros_N = torch.zeros(2, dtype=torch.float64)
    ones_N, two = zeros_N + 1, torch.tensor([2])
    logprobs_N = (-ones_N).requires_grad_()
    others = {"ref_logprobs_N": -ones_N, "teacher_logprobs_N": -ones_N, "rollout_logprobs_N": -ones_N}
    responses = Responses(zeros_N[:1], ones_N[:1], two, two, torch.tensor([0]))

    def gradient(rewards_N: torch.Tensor) -> torch.Tensor:
        tokens = Tokens(logprobs_N, zeros_N, logprobs_N.detach(), rewards_N=rewards_N, **others)
        (found_N,) = torch.autograd.grad(algorithm.loss_sum(tokens, responses).loss, logprobs_N)
        return found_N

    return not torch.equal(gradient(zeros_N), gradient(ones_N))


def require_weights(algorithm: Algorithm, rollouts: Rollouts, weights_G: torch.Tensor) -> None:
    """
    Raises:
        ConfigError: its weights are not its own times those that a node of the pipeline writes.
    """
    if not rollouts.weights:
        return
    own_G = algorithm.weights(replace(rollouts, weights=(1.0,) * len(rollouts.weights)))
    expected_G = own_G * torch.tensor(rollouts.weights, dtype=own_G.dtype)
    if not torch.allclose(weights_G, expected_G):
        raise ConfigError(
            f"pipeline.nodes write rollout_weights, but weights() of algorithm {type(algorithm).__name__} are "
            f"{weights_G.tolist()}, with weights {list(rollouts.weights)} of nodes: expected {expected_G.tolist()}, "
            "its own times `rollouts.weights`"
        )


def require_loss(algorithm: Algorithm, returned: LossSum, *, is_trained: bool) -> LossSum:
    """
    Raises:
        ConfigError: it is no loss with metrics, of one number each; or it has no gradient, where it `is_trained`.
    """
    expected = "a LossSum, with a loss and metrics that are tensors without dimensions"
    if not isinstance(returned, LossSum):
        _refuse(algorithm, "loss_sum()", returned, expected)
    if ENTROPY in returned.metrics:
        _refuse(algorithm, "a metric of loss_sum()", ENTROPY, "another name, since the trainer records the entropy")
    for name, value in (("loss", returned.loss), *returned.metrics.items()):
        if not isinstance(value, torch.Tensor) or value.dim():
            _refuse(algorithm, f"{name!r} of loss_sum()", value, expected)
    if is_trained and not returned.loss.requires_grad:
        _refuse(algorithm, "'loss' of loss_sum()", returned.loss, "a loss with a gradient, of 0 where nothing counts")
    return returned


def require_denominator(algorithm: Algorithm, returned: float) -> float:
    """
    Raises:
        ConfigError: it is no finite number, or a negative one.
    """
    if not isinstance(returned, (int, float)) or not math.isfinite(returned) or returned < 0:
        _refuse(algorithm, "denominator()", returned, "a finite number of 0 or more")
    return returned


def _refuse(algorithm: Algorithm, what: str, returned: object, expected: str) -> None:
    shown = f"{returned!r:.200}" if not isinstance(returned, torch.Tensor) else f"{returned.tolist()!r:.200}"
    raise ConfigError(
        f"algorithm {type(algorithm).__name__}: {what} is {shown}: expected {expected}; test it with check_algorithm "
        "(see algorithms.md)"
    )


def require_one_micro_batch(group: Group, micro_batch_tokens: int, algorithm: str) -> None:
    """
    Raises:
        ConfigError: the group has more than `micro_batch_tokens` rows.
    """
    if num_rows(group) > micro_batch_tokens:
        raise ConfigError(
            f"group {group.index} (prompt {group.prompt.prompt_id!r}) has {num_rows(group)} rows, but "
            f"trainer.micro_batch_tokens is {micro_batch_tokens} and algorithm.name = {algorithm!r} compares "
            "rollouts of a whole group: raise trainer.micro_batch_tokens, or lower rollout.responses_per_prompt or "
            "rollout.max_response_tokens"
        )


def require_known_tokens(group: Group, vocab_size: int) -> None:
    """
    Raises:
        ConfigError: a token id is outside the vocabulary.
    """
    sequences = [*group.responses_by_prompt, *(response.token_ids for response in group.responses)]
    highest = max(max(token_ids, default=0) for token_ids in sequences)
    if highest >= vocab_size:
        raise ConfigError(
            f"group {group.index} (prompt {group.prompt.prompt_id!r}) has token id {highest}, but the model's "
            f"vocabulary ends at {vocab_size - 1}: prompts and instances must use its tokenizer"
        )
