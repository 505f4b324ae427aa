"""DAPO: a higher upper clip and a mean over tokens (arXiv 2503.14476, eq. 8, 10).

Its other parts are options of every algorithm: `overlong_tokens` (eq. 13), `mask_truncated` (overlong filtering). It
has no KL (`kl_coef = 0`, the default).
"""

from async_rl.method.algorithms.policy_gradient import PolicyGradient


class DAPO(PolicyGradient):
    CLIP = (0.2, 0.28)
