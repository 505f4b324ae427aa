"""GRPO: group-relative advantages, clipped ratio, k3 KL to the reference (DeepSeekMath, arXiv 2402.03300, eq. 3-4).

    A_g = (R_g - mean(R)) / (std(R) + 1e-6),    s(r, A) = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

with the sample standard deviation. `normalize = "sequence"` is the paper's form; the default, "token", is DAPO's (arXiv
2503.14476, eq. 8). Departures: the denominator is that of the whole batch instead of one group (with "sequence" and
equal group sizes the two are the same), and large log-ratios have a tangent (`log_ratio.py`).
"""

from async_rl.method.algorithms.policy_gradient import PolicyGradient


class GRPO(PolicyGradient):
    """`PolicyGradient` as it is."""
