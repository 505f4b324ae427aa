"""What `losses.py` compares: settings of TRL, what `async_rl.trl` makes of them, and the samples that both get."""

import math
import random
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.trl import GRPOConfig, RLOOConfig
from async_rl.trl.mapping import algorithm_of
from benchmarks.common.random_model import SIZES

SIZE = SIZES["tiny"]
NUM_BATCHES = 2
PROMPTS_PER_BATCH = 2
MAX_RESPONSE_TOKENS = 9
END = 0
"""Ends a response; others are truncated."""
PARTS = ("first", "second")
"""Of the reward of `gdpo`."""
LARGE = 1e5
"""Of rewards that are divided by their deviation: TRL adds 1e-4 to it, async-rl 1e-6."""


@dataclass(frozen=True)
class Case:
    """The trainer of TRL with its settings; `micro_batches` are TRL's of a step.

    `[algorithm]` here is what `async_rl.trl` makes of these, unless `given` says it.

    The content of a response has `lengths` tokens, at least and at most, and an end if it `ends` at all. Our rewards
    are `times` TRL's: without a deviation they multiply the gradient. `eps` is AdamW's: where the terms of a gradient
    cancel each other, what rounding leaves of them is as large as the default, and would decide steps.
    """

    theirs: dict[str, Any]
    given: dict[str, Any] | None = None
    trainer: Literal["GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer"] = "GRPOTrainer"
    micro_batches: int = 2
    steps_per_batch: int = 2
    responses: int = 4
    lengths: tuple[int, int] = (3, MAX_RESPONSE_TOKENS - 1)
    ends: bool = True
    times: float = 1.0
    eps: float = 1e-8
    same_loss: bool = True
    """Or only the gradient."""

    @property
    def ours(self) -> dict[str, Any]:
        if self.given is not None:
            return self.given
        size = self.responses * PROMPTS_PER_BATCH
        batch: dict[str, Any] = {
            "per_device_train_batch_size": size // self.steps_per_batch,
            "num_generations": self.responses,
        }
        batch |= {"steps_per_generation": self.steps_per_batch} if self.steps_per_batch > 1 else {}
        batch["use_vllm"] = "vllm_importance_sampling_mode" in self.theirs
        if self.trainer == "RLOOTrainer":
            # A KL in the reward is of log-probs that the instances reported, which are made up here.
            return algorithm_of(RLOOConfig(**batch, **{"beta": 0.0} | self.theirs), [])
        return algorithm_of(GRPOConfig(**batch, **{"use_bias_correction_kl": False} | self.theirs), list(PARTS))

    @property
    def reward_scale(self) -> float:
        divided = self.trainer == "GRPOTrainer" and self.theirs.get("scale_rewards") != "none"
        return LARGE if divided else 1.0


IMPORTANCE_HIGH = 1.3
GDPO_WEIGHTS = {"first": 0.3 * LARGE, "second": LARGE}
"""Large, since the batch's deviation is of what they multiply."""
CASES: dict[str, Case] = {
    "grpo": Case({"loss_type": "grpo"}),
    "grpo, token": Case({"loss_type": "dapo", "beta": 0.05}),
    "grpo, no deviation": Case({"loss_type": "dapo", "scale_rewards": "none"}),
    "grpo, batch": Case({"loss_type": "dapo", "scale_rewards": "batch"}),
    "grpo, entropy": Case({"loss_type": "dapo", "entropy_coef": 0.02}, micro_batches=1),
    "grpo, mask_truncated": Case({"loss_type": "dapo", "mask_truncated_completions": True}),
    "dr_grpo": Case({"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": Case({"loss_type": "dapo", "epsilon_high": 0.28}),
    # Its ratio is a token's, TRL's is a whole response's: they are the same in responses of one token, and where the
    # ratio is 1. There the divisor of TRL's loss is the number of responses.
    "rloo, responses of one token": Case(
        {"epsilon": 0.08, "epsilon_high": 0.1},
        {"name": "rloo", "clip_low": 0.08, "clip_high": 0.1},
        trainer="RLOOTrainer",
        responses=8,
        lengths=(1, 1),
        ends=False,
        eps=1e-5,
    ),
    "rloo, one step per batch": Case(
        {},
        trainer="RLOOTrainer",
        steps_per_batch=1,
        lengths=(MAX_RESPONSE_TOKENS, MAX_RESPONSE_TOKENS),
        ends=False,
        times=MAX_RESPONSE_TOKENS,
    ),
    # Wider than the paper's, so that some responses are clipped and some are not.
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
    ),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 1.05}),
    "sapo": Case({"loss_type": "sapo"}),
    "gdpo": Case(
        {
            "loss_type": "dapo",
            "multi_objective_aggregation": "normalize_then_sum",
            "reward_weights": list(GDPO_WEIGHTS.values()),
        },
    ),
    "grpo, bias-corrected KL": Case(
        {"loss_type": "dapo", "beta": 0.05, "use_bias_correction_kl": True}, steps_per_batch=1, same_loss=False
    ),
    "grpo, other limits": Case({"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "scale_rewards": "none"}),
    "dr_grpo, deviation": Case({"loss_type": "dr_grpo", "scale_rewards": "group"}),
    "sapo, other temperatures": Case({"loss_type": "sapo", "sapo_temperature_neg": 1.3, "sapo_temperature_pos": 0.8}),
    "online_dpo": Case({"beta": 0.1}, {"name": "online_dpo"}, trainer="OnlineDPOTrainer", micro_batches=1, responses=2),
    **{
        f"grpo, {mode}": Case(
            {
                "loss_type": "dapo",
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_min": 1 / IMPORTANCE_HIGH if mode.endswith("mask") else None,
                "vllm_importance_sampling_clip_max": IMPORTANCE_HIGH,
            },
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}


def make_groups(case: Case) -> list[dict[str, Any]]:
    """Prompts and responses of different lengths, what an engine might have reported of them, and parts of rewards."""
    draw = random.Random(0)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(2, SIZE["vocab_size"]) for _ in range(draw.randint(least, most))]

    def response() -> list[int]:
        return [*tokens(*case.lengths), *([END] if case.ends and draw.random() < 0.6 else [])]

    def group() -> dict[str, Any]:
        responses = [response() for _ in range(case.responses)]
        near = -math.log(SIZE["vocab_size"])
        return {
            "prompt": tokens(5, 12),
            "responses": responses,
            "logprobs": [[near + draw.gauss(0.0, 0.1) for _ in ids] for ids in responses],
            "rewards": {
                part: [case.reward_scale * draw.random() for _ in responses]
                for part in (PARTS if "reward_weights" in case.theirs else PARTS[:1])
            },
        }

    return [group() for _ in range(NUM_BATCHES * PROMPTS_PER_BATCH)]
