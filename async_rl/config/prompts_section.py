"""The `[prompts]` section: where prompts come from, which of their columns are used, and the order of the rows."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from async_rl.config.section import PlainName, Section

SOURCES = (
    "a .jsonl, .json, .csv or .parquet file, a directory of `datasets`, hf:OWNER/NAME[:CONFIG][:SPLIT], or "
    "reasoning-gym:TASK"
)

TASK_OPTIONS = "options of the reasoning-gym task; its `size` is how many rows are generated, by default 10000"

DIFFICULTY = "difficulty"

COLUMNS = (
    "name that the run uses -> column of the source, or a.b for b in a: prompt (text, or chat messages), answer, "
    "difficulty, stop, stop_token_ids, max_response_tokens, and any that a reward reads"
)


def _are_usable(columns: dict[str, str]) -> dict[str, str]:
    if "temperature" in columns:
        raise ValueError(
            "columns has temperature, but the trainer divides all logits by rollout.temperature: a row cannot have one "
            "of its own; remove it"
        )
    if "" in columns or "" in columns.values():
        raise ValueError(f"columns is {columns}: every name and every column needs a letter")
    return columns


Columns = Annotated[dict[str, str], AfterValidator(_are_usable)]

StopText = Annotated[str, Field(min_length=1)]

MAX_STOPS = 64
"""Texts of a run, of a mixture's part, of a row, and of a program's turn; a request has those of all four."""

RENDERING = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of `apply_chat_template` that are no variables of a template's own."""


class MixturePart(Section):
    """`[[prompts.mixture]]`: one of several sources of prompts."""

    name: PlainName = Field(description="of the part, in prompt ids and metrics")
    source: str = Field(description="as prompts.source")
    weight: float = Field(1.0, gt=0, le=1e6, description="its share of the prompts, relative to the other parts")
    columns: Columns = Field(default_factory=dict, description="as prompts.columns")
    system_prompt: str | None = Field(None, description="by default prompts.system_prompt")
    stop: tuple[StopText, ...] = Field(
        (), max_length=MAX_STOPS, description="texts that end a response, besides those of rollout.stop"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="end a response, besides those of rollout.stop"
    )
    max_response_tokens: int | None = Field(None, ge=1, description="where less than rollout.max_response_tokens")
    reward: tuple[str, ...] = Field(
        (), description="the part of the reward, or the list of parts, that score its rows; by default as reward.column"
    )
    task_options: dict[str, Any] = Field(default_factory=dict, description="as prompts.task_options")

    @field_validator("reward", mode="before")
    @classmethod
    def _may_be_one(cls, reward: Any) -> Any:
        return (reward,) if isinstance(reward, str) else reward

    @field_validator("columns")
    @classmethod
    def _keep_the_source(cls, columns: dict[str, str]) -> dict[str, str]:
        if "source" in columns:
            raise ValueError(f"columns has source, which is the part's name: call {columns['source']!r} something else")
        return columns


class PromptsSection(Section):
    source: str | None = Field(None, description=f"{SOURCES}; or else prompts.mixture")
    prompts_per_batch: int = Field(ge=1, description="B: prompts of one iteration")
    reserve: int = Field(
        0,
        ge=0,
        description="R: further prompts of each iteration, which are trained in place of those whose rewards are all "
        "equal (dynamic sampling, see algorithms.md)",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are reported and left out, once, at start")
    columns: Columns = Field(default_factory=dict, description=COLUMNS)
    chat_template: bool | dict[str, Any] = Field(
        True,
        description="render the prompt with the tokenizer's chat template; or what that gets besides the messages, "
        "wherever it renders, as { enable_thinking = false }",
    )
    system_prompt: str | None = Field(None, description="put before each prompt, in the chat template's system role")
    task_options: dict[str, Any] = Field(default_factory=dict, description=TASK_OPTIONS)
    mixture: tuple[MixturePart, ...] = Field((), description="several sources, [[prompts.mixture]], and their shares")
    deduplicate: bool = Field(False, description="of rows with the same rendered prompt, take the first one only")
    held_out: float = Field(
        0.0,
        ge=0,
        description="rows that are not trained on but evaluated, by the digest of their prompt: a share below 1, or a "
        "number of prompts; evaluation.sets have them as the source held-out",
    )
    curriculum_iterations: int = Field(
        0, ge=0, description="so many iterations take the rows of each epoch in the order of their difficulty"
    )

    @field_validator("chat_template")
    @classmethod
    def _arguments_are_the_templates_own(cls, given: bool | dict[str, Any]) -> bool | dict[str, Any]:
        if isinstance(given, bool):
            return given
        if taken := sorted(given.keys() & RENDERING):
            raise ValueError(
                f"chat_template has {taken[0]}, which the rendering of prompts sets itself: leave it out, and "
                "name only variables that the chat template reads"
            )
        return given or True

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        return {} if isinstance(self.chat_template, bool) else self.chat_template

    @property
    def num_drawn(self) -> int:
        """Prompts of one iteration for which rollouts are generated."""
        return self.prompts_per_batch + self.reserve

    @property
    def drawn_keys(self) -> str:
        """The settings that `num_drawn` follows from, for messages."""
        reserve = f" and prompts.reserve = {self.reserve}" if self.reserve else ""
        return f"prompts.prompts_per_batch = {self.prompts_per_batch}{reserve}"

    @model_validator(mode="after")
    def _has_one_kind_of_source(self) -> "PromptsSection":
        if (self.source is None) == (not self.mixture):
            both = "both are set" if self.mixture else "neither is set"
            raise ValueError(
                f"prompts need either prompts.source or [[prompts.mixture]], but {both}: set prompts.source to "
                f"{SOURCES}"
            )
        names = [part.name for part in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"prompts.mixture has the names {names}: give each part a name of its own")
        for key in ("columns", "task_options"):
            if self.mixture and getattr(self, key):
                raise ValueError(f"prompts.{key} is set beside prompts.mixture: set {key} of each part instead")
        return self

    @model_validator(mode="after")
    def _held_out_can_be_counted(self) -> "PromptsSection":
        if self.held_out >= 1 and self.held_out != int(self.held_out):
            raise ValueError(f"prompts.held_out is {self.held_out}: give a share below 1, or a whole number of prompts")
        return self

    @model_validator(mode="after")
    def _curriculum_has_difficulties(self) -> "PromptsSection":
        if self.curriculum_iterations == 0:
            return self
        without = [part.name for part in self.mixture if DIFFICULTY not in part.columns]
        if without or (not self.mixture and DIFFICULTY not in self.columns):
            where = f"the mixture's parts {without}" if without else "prompts.columns"
            raise ValueError(
                f"prompts.curriculum_iterations is {self.curriculum_iterations}, but {where} name no column of "
                "difficulty: set columns.difficulty to a column of numbers"
            )
        return self
