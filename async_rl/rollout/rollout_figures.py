"""How the rollouts of a program went in a batch: turns, limits, repetitions and the slowest one; for `producer`."""

from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

from async_rl.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class _Rollout:
    num_turns: int
    num_branches: int
    is_truncated: bool
    seconds: float
    num_repeats: int


class RolloutFigures:
    """Collects the finished rollouts of one program."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._rollouts: list[_Rollout] = []

    def note(self, trajectory: Trajectory, seconds: float, num_repeats: int) -> None:
        """Adds a finished rollout: its time since it began, and how often it was run again."""
        is_truncated = trajectory.status == "truncated"
        num_branches = len(trajectory.responses) - 1
        self._rollouts.append(_Rollout(trajectory.num_turns, num_branches, is_truncated, seconds, num_repeats))

    def take(self) -> dict[str, Any]:
        """Those of the rollouts since the last call; empty without any.

        `rollout_s_p50` and `rollout_s_max` are seconds of a rollout: a batch ends with its slowest one.
        """
        rollouts, self._rollouts = self._rollouts, []
        if not rollouts:
            return {}
        return {
            "program": self._program,
            "num_rollouts": len(rollouts),
            "turns_mean": fmean(rollout.num_turns for rollout in rollouts),
            "turns_max": max(rollout.num_turns for rollout in rollouts),
            "branches_mean": fmean(rollout.num_branches for rollout in rollouts),
            "truncated_share": fmean(rollout.is_truncated for rollout in rollouts),
            "rollout_s_p50": median_low(rollout.seconds for rollout in rollouts),
            "rollout_s_max": max(rollout.seconds for rollout in rollouts),
            "num_repeats": sum(rollout.num_repeats for rollout in rollouts),
        }
