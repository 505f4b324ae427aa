"""A run's records by TRL's names of figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.trl.mapping import Batch

Record = Mapping[str, Any]

SAME = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "completions/mean_length": "response_tokens_mean",
    "completions/min_length": "response_tokens_min",
    "completions/max_length": "response_tokens_max",
    "completions/clipped_ratio": "truncated_share",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "sampling/sampling_logp_difference/mean": "logprob_gap_mean_abs",
    "sampling/sampling_logp_difference/max": "max_logprob_gap",
    "learning_rate": "learning_rate",
}
"""TRL's name -> that of docs/metrics.md, of the same quantity."""


def logs_of(record: Record, labels: Sequence[str], batch: Batch, loss_scale: float) -> dict[str, float]:
    """Of one iteration; figures that the run does not have are left out.

    Args:
        labels: of the reward's parts.
        loss_scale: TRL's loss / ours.
    """
    found = {name: record.get(ours) for name, ours in SAME.items()}
    found |= {name: _times(record.get(name), loss_scale) for name in ("loss", "grad_norm")}
    for label in labels:
        found[f"rewards/{label}/mean"] = record.get(f"reward/{label}", record.get("reward_mean"))
    if len(labels) == 1:
        found[f"rewards/{labels[0]}/std"] = record.get("reward_std")
    found["frac_reward_zero_std"] = record["num_groups_without_signal"] / record["num_groups"]
    found["step_time"] = record["seconds"] / batch.steps
    # Its count is of samples, each with its prompt.
    found["num_tokens"] = record["prompt_tokens"] * batch.responses + record["response_tokens"]
    return {name: float(value) for name, value in found.items() if value is not None}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def evaluation_logs_of(record: Record, labels: Sequence[str]) -> dict[str, float]:
    """Of an evaluation: a record of `evaluations.jsonl`, or what `Run.evaluate` returns."""
    found = {
        "eval_reward": record.get("reward_mean"),
        "eval_completions/mean_length": record.get("response_tokens_mean"),
        "eval_completions/clipped_ratio": record.get("truncated_share"),
        "eval_runtime": record.get("seconds"),
    }
    for label in labels:
        found[f"eval_rewards/{label}/mean"] = record.get(f"reward/{label}", record.get("reward_mean"))
    return {name: float(value) for name, value in found.items() if value is not None}
