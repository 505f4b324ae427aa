"""How the rollouts of a program went in a batch: turns, limits, repetitions and the slowest one; for `producer`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

from async_rl.rollouts.groups.trajectory import Trajectory

MAX_ENVIRONMENTS = 16
"""The slowest ones are reported; there may be as many as rows."""

MAX_NAME = 200
"""Characters of a name in a report."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    environment: str
    prompt_id: str
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

    def add_rollout(
        self, environment: str, prompt_id: str, trajectory: Trajectory, seconds: float, num_repeats: int
    ) -> None:
        """Adds a finished rollout: where it ran, its time since it began, and how often it was run again."""
        num_branches, is_truncated = len(trajectory.responses) - 1, trajectory.status == "truncated"
        self._rollouts.append(
            _Rollout(environment, prompt_id, trajectory.num_turns, num_branches, is_truncated, seconds, num_repeats)
        )

    def pop_figures(self) -> dict[str, Any]:
        """Those of the rollouts since the last call; empty without any.

        `rollout_s_p50` and `rollout_s_max` are seconds of a rollout: a batch ends with its slowest one, which is of
        `slowest_prompt_id`. `environments` has the same for each environment, the slowest first, where rows name any.
        """
        rollouts, self._rollouts = self._rollouts, []
        if not rollouts:
            return {}
        turns = [rollout.num_turns for rollout in rollouts]
        figures = {
            "program": self._program,
            "num_rollouts": len(rollouts),
            "turns_mean": fmean(turns),
            "turns_max": max(turns),
            "branches_mean": fmean(rollout.num_branches for rollout in rollouts),
            **_tail(rollouts),
        }
        of_environments: dict[str, list[_Rollout]] = defaultdict(list)
        for rollout in rollouts:
            of_environments[rollout.environment].append(rollout)
        if of_environments.keys() != {self._program}:
            tails = {name[:MAX_NAME]: _environment(some) for name, some in of_environments.items()}
            slowest = sorted(tails, key=lambda name: tails[name]["rollout_s_max"], reverse=True)[:MAX_ENVIRONMENTS]
            figures["environments"] = {name: tails[name] for name in slowest}
        return figures


def _environment(rollouts: Sequence[_Rollout]) -> dict[str, Any]:
    return {"num_rollouts": len(rollouts), **_tail(rollouts)}


def _tail(rollouts: Sequence[_Rollout]) -> dict[str, Any]:
    slowest = max(rollouts, key=lambda rollout: rollout.seconds)
    return {
        "truncated_share": fmean(rollout.is_truncated for rollout in rollouts),
        "rollout_s_p50": median_low(rollout.seconds for rollout in rollouts),
        "rollout_s_max": slowest.seconds,
        "slowest_prompt_id": slowest.prompt_id[:MAX_NAME],
        "num_repeats": sum(rollout.num_repeats for rollout in rollouts),
    }
