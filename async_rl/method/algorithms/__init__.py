"""One small file per algorithm: advantages and a loss as a sum, pure functions on tensors."""

from importlib import import_module

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.algorithm_traits import TRAITS
from async_rl.method.algorithms.base import Algorithm, LossSum, Needs, Responses, Rollouts, Tokens, Totals
from async_rl.method.algorithms.policy_gradient import PolicyGradient
from async_rl.method.algorithms.user_algorithm import load_algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LossSum",
    "Needs",
    "PolicyGradient",
    "Responses",
    "Rollouts",
    "Tokens",
    "Totals",
    "make_algorithm",
]

ALGORITHMS: dict[str, type[PolicyGradient]] = {
    name: getattr(import_module(f"{__name__}.{name}"), traits.cls) for name, traits in TRAITS.items()
}
"""The built-in ones; the file of each has its name."""


def make_algorithm(config: AlgorithmSection, max_response_tokens: int) -> Algorithm:
    """The algorithm named by the config; a user's own class gets the same two arguments.

    Raises:
        ConfigError: its options are wrong, or a user's file cannot be loaded.
    """
    if config.is_own:
        return load_algorithm(config, max_response_tokens)
    return ALGORITHMS[config.name](config, max_response_tokens)
