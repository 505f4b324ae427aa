"""The `[pipeline]` section: what a user adds between the reward of a group and its training (docs/pipeline.md)."""

from keyword import iskeyword
from typing import Annotated, Literal

from pydantic import Field, field_validator

from async_rl.config.section import Section
from async_rl.config.texts import matching

DataName = Annotated[str, matching("[a-z][a-z0-9_]*", "small letters, digits and '_', from a letter on")]

PREFIX = "python:"
NODE = "pipeline.nodes.function"


class PipelineNode(Section):
    """`[[pipeline.nodes]]`: a function that is called once for each group, with what it reads as keyword arguments."""

    name: DataName = Field(description="of the node, in figures and errors")
    function: Annotated[str, matching(f"{PREFIX}.+:.+", "python:path/to/file.py:function")] = Field(
        description="python:path/to/file.py:function, run in processes of its own as a reward is"
    )
    reads: tuple[DataName, ...] = Field(min_length=1, description="what it is called with (see pipeline.md)")
    writes: Literal["shaped_rewards", "rollout_weights", "token_weights", "token_rewards"] | None = Field(
        None, description="what its result is; by default a number per rollout by the node's name, for other nodes"
    )
    timeout_s: float = Field(30.0, gt=0, description="for one group, from when its call begins")
    num_workers: int = Field(1, ge=1, description="processes that run it")
    max_concurrency: int = Field(64, ge=1, description="calls of an asynchronous one under way at once")
    max_attempts: int = Field(1, ge=1, description="calls for one group before the run ends")

    @property
    def written(self) -> str:
        return self.writes or self.name

    @field_validator("reads")
    @classmethod
    def _are_arguments(cls, reads: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(reads)) < len(reads):
            raise ValueError("it names one twice: each is one argument")
        if unusable := [name for name in reads if iskeyword(name)]:
            raise ValueError(f"{unusable[0]!r} is a word of Python and cannot be an argument: give that node a name")
        return reads


class PipelineSection(Section):
    nodes: tuple[PipelineNode, ...] = Field(
        (), description="functions of your own between reward and training (see pipeline.md)"
    )
