"""One small file per algorithm: advantages and a loss as a sum, pure functions on tensors."""

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.method.algorithms.base import Algorithm, LossSum, Needs, Responses, Rollouts, Tokens, Totals
from async_rl.method.algorithms.cispo import CISPO
from async_rl.method.algorithms.dapo import DAPO
from async_rl.method.algorithms.distillation import Distillation
from async_rl.method.algorithms.dppo import DPPO
from async_rl.method.algorithms.dr_grpo import DrGRPO
from async_rl.method.algorithms.gdpo import GDPO
from async_rl.method.algorithms.grpo import GRPO
from async_rl.method.algorithms.gspo import GSPO
from async_rl.method.algorithms.maxrl import MaxRL
from async_rl.method.algorithms.online_dpo import OnlineDPO
from async_rl.method.algorithms.pf_ppo import PFPPO
from async_rl.method.algorithms.policy_gradient import PolicyGradient
from async_rl.method.algorithms.ppo import PPO
from async_rl.method.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from async_rl.method.algorithms.rloo import RLOO
from async_rl.method.algorithms.sapo import SAPO
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
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "gspo": GSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo": DPPO,
    "maxrl": MaxRL,
    "gdpo": GDPO,
    "pf_ppo": PFPPO,
    "online_dpo": OnlineDPO,
    "distillation": Distillation,
    "ppo": PPO,
}


def make_algorithm(config: AlgorithmSection, max_response_tokens: int) -> Algorithm:
    """The algorithm named by the config; a user's own class gets the same two arguments.

    Raises:
        ConfigError: its options are wrong, or a user's file cannot be loaded.
    """
    if config.is_own:
        return load_algorithm(config, max_response_tokens)
    return ALGORITHMS[config.name](config, max_response_tokens)
