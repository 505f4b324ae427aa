"""Dr. GRPO: no division by the deviation, and a constant instead of the length (arXiv 2503.20783, section 3.2).

A_g = R_g - mean(R),    L = 1 / (rollouts x rollout.max_response_tokens) sum over tokens
"""

from async_rl.method.algorithms.policy_gradient import PolicyGradient


class DrGRPO(PolicyGradient):
    NORMALIZE = "constant"
    SCALES_BY_STD = False
