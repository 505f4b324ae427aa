"""The `[rollout]` section: how many responses a prompt gets, how they are sampled, and by which program."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from async_rl.config.prompts_section import MAX_STOPS, StopText
from async_rl.config.section import Section
from async_rl.config.texts import without_brackets

SINGLE_TURN = "single_turn"
"""The rollout that needs no program."""


class ProgramOptions(Section):
    """Of rollouts of a program; without one they have no effect."""

    max_turns: int = Field(16, ge=1, description="turns of a program's rollout, which is truncated there")
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="of a program's rollout: tokens before a turn and its own; by default as many as the model takes",
    )
    renderer: str = Field(
        "auto", description="from messages to tokens: auto, template, or a name of the renderers package"
    )
    timeout_s: float = Field(600.0, gt=0, description="of a program's rollout, which is truncated then")
    max_attempts: int = Field(3, ge=1, description="runs of a rollout whose program fails; then the training run ends")
    max_concurrent: int = Field(256, ge=1, description="rollouts of a program under way at once, for each replica")
    max_concurrent_per_environment: int | None = Field(
        None, ge=1, description="of these, rollouts whose rows name the same `environment`; by default all of them"
    )
    num_workers: int = Field(1, ge=1, description="processes that run the program's rollouts")
    gateway_host: str = Field("127.0.0.1", description="where the gateway listens for agents (see gateway.md)")

    @field_validator("gateway_host")
    @classmethod
    def _is_as_sockets_take_it(cls, host: str) -> str:
        return without_brackets(host)


class RolloutSection(Section):
    responses_per_prompt: int = Field(
        8, ge=1, le=1024, description="G: responses of one group; at least 2, where an algorithm compares them"
    )
    max_response_tokens: int = Field(
        512,
        ge=1,
        description="a response ends here, with finish reason `length`; of a program's rollout all turns together",
    )
    # Logits that are divided by much less are no finite numbers any more.
    temperature: float = Field(
        1.0, ge=1e-6, le=1e6, description="of sampling; the trainer divides its logits by it too"
    )
    stop: tuple[Annotated[int, Field(strict=True)] | StopText, ...] = Field(
        (),
        max_length=MAX_STOPS,
        description="token ids and texts that end a response, besides the model's own end of sequence; it keeps the "
        "tokens up to the end of the first one",
    )
    program: str = Field(
        SINGLE_TURN,
        description="single_turn: one response to each prompt; python:path/to/file.py:function, an asynchronous "
        "function of a prompt and the policy (see rollouts.md); or command:PROGRAM ARGUMENTS, an agent (see "
        "gateway.md)",
    )
    options: ProgramOptions = Field(
        default_factory=ProgramOptions, description="of a program's rollouts, [rollout.options] (see rollouts.md)"
    )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Those of `stop` that are texts."""
        return tuple(each for each in self.stop if isinstance(each, str))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Those of `stop` that are token ids."""
        return tuple(each for each in self.stop if isinstance(each, int))

    @model_validator(mode="before")
    @classmethod
    def _samples_every_token(cls, tree: Any) -> Any:
        for key in ("top_p", "top_k", "min_p"):
            if isinstance(tree, dict) and key in tree:
                raise ValueError(
                    f"rollout.{key} (value {tree[key]!r}) is no setting: the trainer's log-probs are of the whole "
                    "distribution, and would not be those of tokens drawn from its most likely part, unless it knew "
                    "at each token which others had been left in; remove it, or lower rollout.temperature"
                )
        return tree
