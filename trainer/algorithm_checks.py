"""What an algorithm needs of a run's settings, what it returns, and the groups that it trains, checked before they are.

For a user's own one, which no config knows; `check_algorithm` (`async_rl/method/algorithms/checking.py`) finds more,
without a run.
"""

import math

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.train_section import TrainSection
from async_rl.errors import ConfigError
from async_rl.method.algorithms import Algorithm, LossSum, Needs, Rollouts
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


def require_read(algorithm: Algorithm, group: Group) -> None:
    """
    Raises:
        ConfigError: nodes of the pipeline say something of the group's tokens, and the algorithm, a user's own one, has
            a loss of its own, which need not read it.
    """
    first = group.responses[0]
    said = [name for name in ("token_weights", "token_rewards") if getattr(first, name) is not None]
    if said and getattr(type(algorithm), "loss_sum", None) is not PolicyGradient.loss_sum:
        raise ConfigError(
            f"pipeline.nodes write {' and '.join(said)}, but algorithm {type(algorithm).__name__} has a loss_sum of "
            "its own: leave the nodes out, or inherit the loss of PolicyGradient"
        )


def require_left_out(algorithm: Algorithm, rollouts: Rollouts, weights_G: torch.Tensor) -> None:
    """
    Raises:
        ConfigError: a rollout that a node of the pipeline leaves out counts.
    """
    if any(weight == 0 and own > 0 for weight, own in zip(rollouts.weights, weights_G.tolist(), strict=False)):
        raise ConfigError(
            f"pipeline.nodes write rollout_weights, but algorithm {type(algorithm).__name__} gives a rollout of weight "
            "0 another one: its weights() has to multiply its own by `rollouts.weights`"
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
