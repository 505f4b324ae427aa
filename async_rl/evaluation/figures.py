"""From scored responses to the figures of an evaluation; pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from async_rl.metrics import SOLVED_REWARD
from async_rl.types import Response


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """What is kept of a prompt's responses: their rewards, their lengths, and how many were cut by their length."""

    rewards: tuple[float, ...]
    num_tokens: int
    num_cut: int

    @classmethod
    def of(cls, responses: Sequence[Response], rewards: Sequence[float]) -> "ScoredPrompt":
        return cls(
            rewards=tuple(rewards),
            num_tokens=sum(len(response.token_ids) for response in responses),
            num_cut=sum(response.finish_reason == "length" for response in responses),
        )

    @property
    def num_solved(self) -> int:
        return sum(reward >= SOLVED_REWARD for reward in self.rewards)


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that k of a prompt's samples, drawn without replacement, have a solved one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimate of the chance that one of k new samples solves it (arXiv 2107.03374); needs 1 <= k <= n.
    """
    assert 1 <= k <= num_samples and 0 <= num_solved <= num_samples, f"n {num_samples}, c {num_solved}, k {k}"
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def ks_of(num_samples: int) -> list[int]:
    """The k for which pass@k is given: powers of two up to the number of samples, and that number."""
    return sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})


def figures_of(scored: Sequence[ScoredPrompt]) -> dict[str, float]:
    """Means over prompts, each with equally many responses; none where there is no prompt."""
    if not scored:
        return {}
    num_samples = len(scored[0].rewards)
    num_responses = num_samples * len(scored)
    passes = {
        f"pass@{k}": fmean(pass_at_k(num_samples, prompt.num_solved, k) for prompt in scored)
        for k in ks_of(num_samples)
    }
    return passes | {
        "reward_mean": fmean(reward for prompt in scored for reward in prompt.rewards),
        "response_tokens_mean": sum(prompt.num_tokens for prompt in scored) / num_responses,
        "cut_share": sum(prompt.num_cut for prompt in scored) / num_responses,
    }
