"""The `[critic]` section: the model that estimates values, for `algorithm.name = "ppo"`."""

from pydantic import Field

from async_rl.config.section import Section


class CriticSection(Section):
    """What it does not have, such as AdamW's other settings, it shares with the policy."""

    learning_rate: float = Field(
        1e-5, gt=0, description="of the critic at its peak; warm-up, decay, AdamW and clipping are [optimizer]'s"
    )
    path: str | None = Field(
        None,
        description="checkpoint that the critic begins with, of a model with the same tokenizer, or of a reward model "
        "with one label; by default model.path",
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
    iterations_alone: int = Field(
        0, ge=0, description="first iterations, in which the critic learns and the policy's weights stay as they are"
    )


NO_CRITIC = CriticSection()
