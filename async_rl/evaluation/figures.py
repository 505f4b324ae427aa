"""From scored responses to the figures of an evaluation; pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from async_rl.rollout.trajectory import Trajectory
from async_rl.tracking.pass_at_k import ks_of, pass_at_k
from async_rl.types import CorrectAt, Response, RewardParts, Scores, num_correct, reward_part_means


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The data kept of a prompt's rollouts: rewards, lengths, and how many were cut by a limit."""

    rewards: tuple[float, ...]
    num_tokens: int
    num_cut: int
    reward_parts: RewardParts = ()

    @classmethod
    def of(cls, responses: Sequence[Response], scores: Scores) -> "ScoredPrompt":
        return cls(
            rewards=scores.rewards,
            reward_parts=scores.parts,
            num_tokens=sum(len(response.token_ids) for response in responses),
            num_cut=sum(response.finish_reason == "length" for response in responses),
        )

    @classmethod
    def of_trajectories(cls, trajectories: Sequence[Trajectory], scores: Scores) -> "ScoredPrompt":
        return cls(
            rewards=scores.rewards,
            reward_parts=scores.parts,
            num_tokens=sum(trajectory.num_tokens for trajectory in trajectories),
            num_cut=sum(trajectory.status == "truncated" for trajectory in trajectories),
        )


def figures_of(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, float]:
    """Means over the prompts of a complete set, each with the same number of responses.

    pass@k over the prompts for which it is defined when a response is correct.
    """
    num_samples = len(scored[0].rewards)
    num_responses = num_samples * len(scored)
    counts = [num_correct(correct_at, prompt.rewards, prompt.reward_parts) for prompt in scored]
    judged = [count for count in counts if count is not None]
    ks = ks_of(num_samples) if judged else []
    return {f"pass@{k}": fmean(pass_at_k(num_samples, count, k) for count in judged) for k in ks} | {
        "reward_mean": fmean(reward for prompt in scored for reward in prompt.rewards),
        **reward_part_means(prompt.reward_parts for prompt in scored),
        "response_tokens_mean": sum(prompt.num_tokens for prompt in scored) / num_responses,
        "cut_share": sum(prompt.num_cut for prompt in scored) / num_responses,
    }
