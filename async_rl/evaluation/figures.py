"""From scored responses to the figures of an evaluation and their confidence intervals; pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from async_rl.evaluation.intervals import Interval, mean_interval, share_interval
from async_rl.method.types import CorrectAt, RewardParts, Scores, num_correct, reward_part_means
from async_rl.records.pass_at_k import ks_of, pass_at_k
from async_rl.rollouts.groups.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The data kept of a prompt's rollouts: rewards, lengths, and how many a limit truncated."""

    rewards: tuple[float, ...]
    num_tokens: int
    num_truncated: int
    reward_parts: RewardParts = ()

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], scores: Scores) -> "ScoredPrompt":
        return cls(
            rewards=scores.rewards,
            reward_parts=scores.shown,
            num_tokens=sum(trajectory.num_tokens for trajectory in trajectories),
            num_truncated=sum(trajectory.status == "truncated" for trajectory in trajectories),
        )


def figures_of(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, float]:
    """Means over the prompts of a complete set, each with the same number of responses.

    avg@k (the share of correct samples, k of each prompt) and pass@k over the prompts for which it is defined when a
    response is correct.
    """
    num_responses = len(scored[0].rewards) * len(scored)
    return {name: fmean(values) for name, (values, _) in _shares(scored, correct_at).items()} | {
        "reward_mean": fmean(reward for prompt in scored for reward in prompt.rewards),
        **reward_part_means(prompt.reward_parts for prompt in scored),
        "response_tokens_mean": sum(prompt.num_tokens for prompt in scored) / num_responses,
        "truncated_share": sum(prompt.num_truncated for prompt in scored) / num_responses,
    }


def intervals_of(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, Interval]:
    """The confidence interval of each of these figures that has one: avg@k, pass@k, the mean reward."""
    intervals = {name: share_interval(*share) for name, share in _shares(scored, correct_at).items()}
    rewards = mean_interval([fmean(prompt.rewards) for prompt in scored])
    return intervals | ({} if rewards is None else {"reward_mean": rewards})


def _shares(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, tuple[list[float], int]]:
    """figure -> its value for each prompt that has one, and how many independent samples these are at most."""
    size = len(scored[0].rewards)
    counts = [num_correct(correct_at, prompt.rewards, prompt.reward_parts) for prompt in scored]
    judged = [count for count in counts if count is not None]
    if not judged:
        return {}
    shares = {f"avg@{size}": ([count / size for count in judged], size * len(judged))}
    return shares | {
        f"pass@{k}": ([pass_at_k(size, count, k) for count in judged], size // k * len(judged)) for k in ks_of(size)
    }
