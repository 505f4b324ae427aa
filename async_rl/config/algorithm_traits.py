"""The built-in algorithms, by name, and what is known of each without torch: for the settings, the checks before a
start and the forecast, which may not import the algorithms themselves.

A new algorithm has its line here; its file in `async_rl/method/algorithms/` has the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from async_rl.config.section import NoOptions, Section


class CriticOptions(Section):
    """Of the model that estimates values; AdamW's other settings, warm-up, decay and clipping are the policy's."""

    critic_learning_rate: float = Field(1e-5, gt=0, description="at its peak")
    critic_path: str | None = Field(
        None,
        description="checkpoint that the critic begins with, of a model with the same tokenizer, or of a reward model "
        "with one label; by default model.path",
    )
    critic_iterations_alone: int = Field(
        0, ge=0, description="first iterations, in which the critic learns and the policy's weights stay as they are"
    )
    gamma: float = Field(1.0, gt=0.0, le=1.0, description="discount of a reward per sampled token that lies before it")
    gae_lambda: float = Field(
        1.0, ge=0.0, le=1.0, description="of generalized advantage estimation: 1 trusts rewards only, 0 the next value"
    )
    value_clip: float = Field(
        0.2,
        ge=0.0,
        description="values count in their loss from the old value less this to the old value plus this; 0 for no "
        "limit. It cannot bind at the first step of a batch",
    )


class DPPOOptions(Section):
    delta: float = Field(0.2, gt=0, le=1)


class GDPOOptions(Section):
    weights: dict[str, float] = Field(default_factory=dict)
    """Of parts of the reward, by their names."""


class OnlineDPOOptions(Section):
    beta: float = Field(0.1, gt=0)


class PFPPOOptions(Section):
    power: float = Field(2.0, gt=0)


class SAPOOptions(Section):
    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)


@dataclass(frozen=True, slots=True)
class Traits:
    """What an algorithm reads of `[algorithm]`, and what it asks of a run; `cls` is the name of its class.

    `options` are its `[algorithm.options]`, `unused` the settings that have no effect on it. `totals`, `whole_groups`
    and `values` are as in `algorithms.base.Needs`, whatever the settings are; with `scaled_by_batch` the
    default of `scale_by_std` is "batch". `single_rollouts`: it learns from one, and compares none of a prompt.
    `reference`: it has a reference policy whatever `kl_coef` is.
    """

    cls: str = ""
    options: type[Section] = NoOptions
    unused: tuple[str, ...] = ()
    totals: bool = False
    scaled_by_batch: bool = False
    whole_groups: bool = False
    values: bool = False
    single_rollouts: bool = False
    reference: bool = False


TRAITS: Mapping[str, Traits] = {
    "grpo": Traits("GRPO"),
    "dr_grpo": Traits("DrGRPO"),
    "dapo": Traits("DAPO"),
    "rloo": Traits("RLOO"),
    "reinforce_pp_baseline": Traits("ReinforcePPBaseline", totals=True, unused=("scale_by_std",)),
    "gspo": Traits("GSPO"),
    "cispo": Traits("CISPO"),
    "sapo": Traits("SAPO", options=SAPOOptions, unused=("clip_low", "clip_high")),
    "dppo": Traits("DPPO", options=DPPOOptions, unused=("clip_low", "clip_high")),
    # Shaped rewards may be negative.
    "maxrl": Traits("MaxRL", unused=("scale_by_std", "overlong_tokens", "kl_in")),
    "gdpo": Traits("GDPO", options=GDPOOptions, scaled_by_batch=True),
    "pf_ppo": Traits("PFPPO", options=PFPPOOptions),
    "online_dpo": Traits(
        "OnlineDPO",
        options=OnlineDPOOptions,
        whole_groups=True,
        reference=True,
        unused=(
            *("kl_coef", "kl_estimator", "kl_in", "entropy_coef", "teacher", "teacher_coef"),
            *("importance", "importance_high"),
            *("normalize", "scale_by_std", "clip_low", "clip_high"),
        ),
    ),
    "distillation": Traits("Distillation", single_rollouts=True, unused=("scale_by_std", "overlong_tokens", "kl_in")),
    "ppo": Traits("PPO", options=CriticOptions, values=True, single_rollouts=True, unused=("scale_by_std",)),
}
