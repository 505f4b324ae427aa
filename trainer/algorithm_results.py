"""Checks of what an algorithm returns, for a user's own one: what is wrong is said, before it is trained.

`check_algorithm` (`async_rl/algorithms/checking.py`) finds more, without a run.
"""

import math

import torch

from async_rl.algorithms import Algorithm, LossSum
from async_rl.errors import ConfigError
from async_rl.types import Group

ENTROPY = "entropy"
"""The metric that is recorded with every algorithm."""


def require_of_rollouts(algorithm: Algorithm, method: str, returned: torch.Tensor, group: Group) -> torch.Tensor:
    """Advantages or weights as they were returned, which must be one finite number per rollout.

    Raises:
        ConfigError: they are not.
    """
    size = len(group.rewards)
    fits = isinstance(returned, torch.Tensor) and returned.shape == (size,) and bool(returned.isfinite().all())
    if not fits:
        _refuse(algorithm, f"{method}() of group {group.index}", returned, f"{size} finite numbers, float64 [{size}]")
    return returned


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
