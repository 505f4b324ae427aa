"""One small file per algorithm: advantages and a loss as a sum, pure functions on tensors."""

from async_rl.algorithms.base import Algorithm, LossSum, Responses
from async_rl.algorithms.grpo import GRPO
from async_rl.config.sections import AlgorithmSection

__all__ = ["Algorithm", "LossSum", "Responses", "make_algorithm"]


def make_algorithm(config: AlgorithmSection) -> Algorithm:
    """The algorithm named by the config."""
    return GRPO(config)
