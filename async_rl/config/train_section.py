"""The settings of training: `[optimizer]` and `[train]`."""

from typing import Literal

from pydantic import Field, model_validator

from async_rl.config.section import Section


class OptimizerSection(Section):
    learning_rate: float = Field(1e-6, gt=0, description="at its peak, after the warm-up")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="how the learning rate goes from its peak to its end"
    )
    min_learning_rate_ratio: float = Field(1.0, ge=0.0, le=1.0, description="learning rate at the end / at the peak")
    warmup_iterations: int = Field(0, ge=0, description="linear warm-up; then the schedule, to the end of the run")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="AdamW, whose beta1 is 0.9 and whose eps is 1e-8")
    weight_decay: float = Field(0.0, ge=0.0, description="AdamW; norms and biases are left out")
    clip_grad_norm: float = Field(1.0, gt=0, description="largest norm of the whole gradient")

    @model_validator(mode="after")
    def _schedule_has_its_end(self) -> "OptimizerSection":
        ratio = self.min_learning_rate_ratio
        if self.schedule == "cosine" and ratio == 1.0:
            raise ValueError(
                "schedule is cosine, but min_learning_rate_ratio is 1: the rate would stay at its peak; set it to "
                "where the curve ends, such as 0.1, or 0"
            )
        if self.schedule == "constant" and ratio != 1.0:
            raise ValueError(
                f"schedule is constant, but min_learning_rate_ratio is {ratio:g}: remove it, or set schedule to linear"
            )
        return self


MAX_EPOCHS = 1e9
"""So many of any number of rows are still a whole number of iterations."""


class TrainSection(Section):
    iterations: int | None = Field(None, ge=1, description="batches to train; or else train.epochs")
    epochs: float | None = Field(
        None,
        gt=0,
        le=MAX_EPOCHS,
        description="how often every row is drawn, 0.5 for every other one; the start makes train.iterations of it",
    )
    steps_per_batch: int = Field(
        1,
        ge=1,
        description="optimizer steps per batch, one per mini-batch of its prompts; more than 1 need an old model",
    )
    mode: Literal["periodic", "synchronous"] = Field(
        "periodic", description="train from the first finished group on, or only after the last (the baseline)"
    )
    order: Literal["completion", "prompt"] = Field(
        "completion",
        description="train groups as they finish, or by index in the batch (repeatable, with exact bit for bit)",
    )
    logprob_noise: float | None = Field(
        None,
        gt=0,
        description="RMS of trainer - rollout log-probs, in nats per token, that sound engines may have; by default "
        "what the rounding of model.dtype explains (see proof.md)",
    )
    exact: bool = Field(
        False,
        description="trainer and embedded engine compute log-probs that are equal bit for bit, and the proof demands "
        "it; float32 on CPUs of one kind (see exact.md)",
    )

    router_replay: bool = Field(
        False,
        description="of a model with experts: the trainer's rows go to the experts that the instance chose for them "
        "(arXiv 2510.11370, see models.md)",
    )

    @property
    def num_iterations(self) -> int:
        """Of a run whose rows are known, see `Config.with_iterations`."""
        assert self.iterations is not None, f"train.epochs = {self.epochs} is no number of iterations yet"
        return self.iterations

    @model_validator(mode="after")
    def _has_one_length(self) -> "TrainSection":
        if self.iterations is None and self.epochs is None:
            raise ValueError(
                "train.iterations and train.epochs are both missing: set one of them, the batches to train or how "
                "often every row is drawn, in the file or as --train.iterations INT or --train.epochs FLOAT"
            )
        if self.iterations is not None and self.epochs is not None:
            raise ValueError(
                f"train.iterations is {self.iterations} and train.epochs is {self.epochs:g}, but each of them is the "
                "length of the run: remove one; on the command line --train.iterations null or --train.epochs null "
                "does so"
            )
        return self
