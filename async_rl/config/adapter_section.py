"""The `[adapter]` section: low-rank adapters (LoRA) in place of training all weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from pydantic import Field, model_validator

from async_rl.config.section import Section

ALL_LINEAR: Final = "all-linear"

Target = Literal["all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ENABLE_LORA, MAX_LORA_RANK = "--enable-lora", "--max-lora-rank"
"""vLLM's options, without which it takes no adapters."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 accepts for the second (`vllm/config/lora.py`)."""


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

    @property
    def sorted_targets(self) -> list[str]:
        """The same for the same layers, in whatever order and by whichever name they were given."""
        return [ALL_LINEAR] if {*self.targets, ALL_LINEAR} == {*get_args(Target)} else sorted(self.targets)

    def targets_layer(self, hf_name: str) -> bool:
        """Whether the linear layer of this weight, such as "model.layers.0.mlp.up_proj.weight", has an adapter."""
        return ALL_LINEAR in self.targets or hf_name.removesuffix(".weight").rpartition(".")[2] in self.targets

    @property
    def vllm_rank(self) -> int | None:
        """The least of those that vLLM is started for which holds these adapters; their own where none does."""
        return min((each for each in VLLM_RANKS if each >= (self.rank or 0)), default=self.rank)

    def vllm_options(self, options: Sequence[str]) -> tuple[str, ...]:
        """vLLM's options, and those that it lacks for these adapters alone."""
        given = {word.partition("=")[0] for word in options}
        needed = {ENABLE_LORA: (ENABLE_LORA,), MAX_LORA_RANK: (MAX_LORA_RANK, str(self.vllm_rank))}
        return (*options, *(word for key, words in needed.items() if key not in given for word in words))

    @model_validator(mode="after")
    def _all_linear_is_alone(self) -> "AdapterSection":
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(
                f"adapter.targets has {ALL_LINEAR!r} beside others, which it contains: leave one of them out"
            )
        if twice := next((each for each in self.targets if self.targets.count(each) > 1), None):
            raise ValueError(f"adapter.targets has {twice!r} twice: leave one out")
        return self
