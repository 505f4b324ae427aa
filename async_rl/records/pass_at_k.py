"""pass@k from counts of correct samples; for the figures of iterations and of evaluations."""

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that k of a prompt's samples, drawn without replacement, include a correct one:
    1 - C(n-c, k) / C(n, k).

    The unbiased estimate of the probability that one of k new samples is correct (arXiv 2107.03374); needs 1 <= k <= n.
    """
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples, f"n {num_samples}, c {num_correct}, k {k}"
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks_of(num_samples: int) -> list[int]:
    """The values of k for pass@k: powers of two up to the number of samples, and that number."""
    return sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})
