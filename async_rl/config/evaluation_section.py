"""The `[evaluation]` section: what is evaluated during a run, and when."""

from pydantic import Field

from async_rl.config.prompts_section import Columns
from async_rl.config.section import PlainName, Section


class EvaluationSet(Section):
    """`[[evaluation.sets]]`: prompts are rendered as those of the `prompts` section, and answered and scored as in
    training."""

    name: PlainName = Field(description="as its figures are called")
    source: str = Field(description="as prompts.source, or held-out: the rows of prompts.held_out")
    columns: Columns | None = Field(None, description="as those of prompts, which are the default")
    num_samples: int = Field(1, ge=1, le=1024, description="k: rollouts per prompt, for pass@1 and pass@k")
    max_prompts: int | None = Field(None, ge=1, description="take the first so many rows only")
    temperature: float = Field(1.0, ge=0.0, le=1e6, description="of sampling; 0 takes the most likely tokens")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="sample from the likeliest tokens whose probabilities add up to it; 1 for all"
    )
    top_k: int = Field(0, ge=0, description="sample from the so many likeliest tokens; 0 for all")


class EvaluationSection(Section):
    sets: tuple[EvaluationSet, ...] = Field((), description="what is evaluated: at first, every so often, at the end")
    every: int = Field(10, ge=1, description="iterations from one evaluation to the next")
