"""The `[algorithm]` section; which algorithm reads what stands in algorithms.md."""

from typing import Any, Literal

from pydantic import Field, model_validator

from async_rl.config.algorithm_traits import TRAITS, CriticOptions, Traits
from async_rl.config.section import Section, read_options
from async_rl.errors import ConfigError

Normalize = Literal["token", "sequence", "constant"]

BUILT_IN = ", ".join(TRAITS)
WHOLE_REWARD, SHAPING = "reward", "shaping"
"""As these weights call a reward without parts, and what options of the algorithm add to it."""


class AlgorithmSection(Section):
    name: str = Field("grpo", description=f"{BUILT_IN}, or python:path/to/file.py:Class, your own (see algorithms.md)")
    options: dict[str, Any] = Field(default_factory=dict, description="of the algorithm itself (see algorithms.md)")
    clip_low: float | None = Field(
        None, ge=0.0, description="the ratio counts from 1 - clip_low; by default as in the algorithm's paper"
    )
    clip_high: float | None = Field(None, ge=0.0, description="to 1 + clip_high; by default likewise")
    normalize: Normalize | None = Field(
        None,
        description="the loss is a mean over the batch's sampled tokens (token), over its rollouts of the mean over "
        "each one's (sequence), or a sum over tokens by rollouts x rollout.max_response_tokens (constant); by default "
        "as in the algorithm's paper",
    )
    scale_by_std: Literal[True, False, "batch"] | None = Field(
        None,
        description="divide advantages by the standard deviation of the group's rewards, of the batch's, or by none; "
        "by default as in the algorithm's paper",
    )
    kl_coef: float = Field(0.0, ge=0.0, description="weight of the KL to the reference; 0 keeps no reference")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of the KL, from a sampled token's log-probs")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="the KL is a term of each token's loss, or its sum over a rollout is taken from the reward"
    )
    entropy_coef: float = Field(0.0, ge=0.0, description="weight of the policy's entropy, which the loss rewards")
    mask_truncated: bool = Field(False, description="leave out rollouts that a limit ended; they count in the baseline")
    overlong_tokens: int | None = Field(
        None,
        ge=1,
        description="a rollout loses reward over so many tokens before rollout.max_response_tokens, linearly, and 1 at "
        "the limit",
    )
    old_policy: Literal["reuse", "model", "lagged", "rollout"] = Field(
        "reuse",
        description="denominator of the ratio: the policy's own log-probs, detached; a model with the published "
        "weights; one with the weights before the last step; or the log-probs that the instances reported",
    )
    importance: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "none",
        description="weigh tokens by their probability in the trainer over that at the instance, at most "
        "importance_high, or leave out those outside the limits",
    )
    importance_high: float = Field(
        2.0, gt=1.0, description="largest weight; the least that a mask leaves in is 1 / importance_high"
    )
    teacher: str | None = Field(
        None, description="checkpoint of a model with the same tokenizer, whose log-probs are rewards of tokens"
    )
    teacher_coef: float = Field(1.0, gt=0.0, description="weight of the reverse KL to the teacher in advantages")

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own class; what that needs is known to the trainer only."""
        return self.name.startswith("python:")

    @property
    def traits(self) -> Traits:
        """Of a user's own class, of which only the trainer knows what it needs, those without any."""
        return TRAITS.get(self.name, Traits())

    @property
    def critic(self) -> CriticOptions:
        """Of an algorithm with a critic; of a user's own class, of which only the trainer knows whether it has one,
        those options that are called as a critic's.

        Raises:
            ConfigError: a value does not fit.
        """
        if not self.is_own and not self.traits.values:
            return CriticOptions()
        options = {key: value for key, value in self.options.items() if key in CriticOptions.model_fields}
        return read_options("algorithm", self.name, options, CriticOptions)

    @property
    def needs_reference(self) -> bool:
        """Whether a built-in algorithm compares with the initial policy (`Needs.reference`)."""
        return self.kl_coef > 0 or self.traits.reference

    @property
    def is_scaled_by_batch(self) -> bool:
        """Whether a built-in algorithm divides advantages by a deviation over the batch."""
        return self.traits.scaled_by_batch if self.scale_by_std is None else self.scale_by_std == "batch"

    @property
    def waits_for_batch(self) -> bool:
        """Whether a built-in algorithm needs a batch's totals before the first advantage (`Needs.totals`)."""
        # The deviation divides the surrogate only: a sum that holds other terms cannot be divided by it later.
        adds_terms = self.entropy_coef > 0 or (self.kl_coef > 0 and self.kl_in == "loss") or self.teacher is not None
        return self.traits.totals or (self.is_scaled_by_batch and adds_terms)

    @model_validator(mode="after")
    def _is_known(self) -> "AlgorithmSection":
        if self.name not in TRAITS and not self.is_own:
            raise ValueError(
                f"algorithm.name is {self.name!r}: expected one of {BUILT_IN}, or python:path/to/file.py:Class"
            )
        return self

    def refuse_unused(self, unused: tuple[str, ...]) -> None:
        """
        Raises:
            ConfigError: a setting that has no effect is not its default.
        """
        fields = type(self).model_fields
        if changed := [f"algorithm.{key}" for key in unused if getattr(self, key) != fields[key].default]:
            raise ConfigError(f"algorithm.name = {self.name!r} does not use {', '.join(changed)}: remove them")

    @model_validator(mode="after")
    def _built_in_ones_use_what_is_set(self) -> "AlgorithmSection":
        if not self.is_own:
            self.refuse_unused(self.traits.unused)
            read_options("algorithm", self.name, self.options, self.traits.options)
        return self

    @model_validator(mode="after")
    def _terms_have_what_they_need(self) -> "AlgorithmSection":
        if self.name == "distillation" and self.teacher is None:
            raise ValueError(
                "algorithm.name is 'distillation', but algorithm.teacher is not set: name the teacher's checkpoint"
            )
        if self.importance != "none" and self.old_policy == "rollout":
            raise ValueError(
                f"algorithm.importance is {self.importance!r} with old_policy = 'rollout': the ratio has the "
                "instances' log-probs in it already; set one of them"
            )
        if self.importance != "none" and self.old_policy == "lagged":
            raise ValueError(
                f"algorithm.importance is {self.importance!r} with old_policy = 'lagged': what is corrected is the "
                "trainer's copy of the weights that sampled, and the lagged model has those of the step before; set "
                "old_policy to 'reuse' or 'model'"
            )
        if self.waits_for_batch and self.kl_coef > 0 and self.kl_in == "reward":
            raise ValueError(
                f"algorithm.kl_in is 'reward' with algorithm.name = {self.name!r} and scale_by_std = "
                f"{self.scale_by_std!r}, which need the batch's rewards before the reference has scored the first "
                "rollout: set kl_in to 'loss'"
            )
        return self
