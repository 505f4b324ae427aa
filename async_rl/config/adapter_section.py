"""The `[adapter]` section: low-rank adapters (LoRA) in place of training all weights."""

from pathlib import Path
from typing import Final, Literal

from pydantic import Field, model_validator

from async_rl.config.section import Section

ALL_LINEAR: Final = "all-linear"

Target = Literal["all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class AdapterSection(Section):
    """Names are those of peft; its dropout and its other forms are not offered."""

    rank: int | None = Field(
        None, ge=1, description="of the adapters that are trained in place of the model's own weights; by default none"
    )
    alpha: float = Field(32.0, ge=1e-6, le=1e6, description="what an adapter adds is multiplied by alpha / rank")
    targets: tuple[Target, ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        description="linear layers that have one: all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj",
    )
    path: Path | None = Field(None, description="a peft directory with adapters to start from; by default new ones")
    publish: Literal["auto", "merged", "adapters"] = Field(
        "auto",
        description="instances get whole weights with the adapters in them, or the adapters alone, which they compute "
        "beside the base; auto: alone where the engine can (see adapters.md)",
    )

    @property
    def is_given(self) -> bool:
        return self.rank is not None

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank or 1)

    def targets_layer(self, hf_name: str) -> bool:
        """Whether the linear layer of this weight, such as "model.layers.0.mlp.up_proj.weight", has an adapter."""
        return ALL_LINEAR in self.targets or hf_name.removesuffix(".weight").rpartition(".")[2] in self.targets

    @model_validator(mode="after")
    def _all_linear_is_alone(self) -> "AdapterSection":
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"targets has {ALL_LINEAR!r} beside others, which it contains: leave one of them out")
        return self
