"""The `[cluster]` section: what the launchers of several hosts need."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from async_rl.config.section import ProgramText, Section
from async_rl.config.texts import matching

LAUNCHERS_OWN = ("--array", "-a", "--dependency", "-d", "--parsable", "--test-only", "--wait", "-W", "--wrap")
"""Options of sbatch that decide what a job is, or whether it is submitted."""


def _is_left_to_users(option: str) -> str:
    name = option.partition("=")[0].split()[0]
    if name in LAUNCHERS_OWN or (not name.startswith("--") and name[:2] in LAUNCHERS_OWN):
        raise ValueError(f"{option!r} belongs to the launcher: leave it out")
    return option


SlurmOption = Annotated[
    str, matching(r"-[^\n\r\x00]+", "one line that begins with '-'"), AfterValidator(_is_left_to_users)
]
"""One line of a job script."""

SlurmOptions = dict[Literal["all", "training", "instances"], tuple[SlurmOption, ...]]


def _of_all_jobs(options: Any) -> Any:
    return {"all": options} if isinstance(options, list | tuple) else options


VariableName = Annotated[
    str, matching("[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and '_' that begins with no digit")
]

TOKEN_VARIABLE = "ASYNC_RL_TOKEN"


class ClusterSection(Section):
    """What `async-rl launch` needs beyond the other sections; of it `async-rl run` uses the restarts."""

    training_nodes: int = Field(1, ge=1, description="hosts that train, each with trainer.num_processes ranks")
    max_instances: int | None = Field(
        None,
        ge=1,
        description="instances at most, where the launcher follows async_rl_desired_instances; by default "
        "inference.num_instances, which is the least",
    )
    python: str | None = Field(None, description="the interpreter on the hosts; by default the launcher's own")
    env: dict[VariableName, ProgramText] = Field(
        default_factory=dict, description="environment of all tasks; never put secrets here"
    )
    max_restarts: int = Field(
        3, ge=0, description="restarts of the trainer, and of each instance, without progress in between"
    )
    slurm_options: Annotated[SlurmOptions, BeforeValidator(_of_all_jobs)] = Field(
        default_factory=dict,
        description="further sbatch options, such as `--partition=gpu` and `--time=12:00:00`: a list for all jobs, or "
        "lists called all, training and instances",
    )

    @model_validator(mode="after")
    def _environment_has_no_token(self) -> "ClusterSection":
        if TOKEN_VARIABLE in self.env:
            raise ValueError(
                f"env has {TOKEN_VARIABLE}, which others could read in job scripts and manifests: remove it, and set "
                "it in the environment of the launcher"
            )
        return self
