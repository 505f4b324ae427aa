"""Writes docs/configuration.md from the settings' own descriptions: `python -m tests.support.configuration_page`.

tests/test_configuration_page.py fails while the page says something else than the code does.
"""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.keys import default_of
from async_rl.config.pipeline_section import PipelineNode
from async_rl.config.prompts_section import MixturePart
from async_rl.config.reward_section import OPTIONS, HTTPOptions, JudgeOptions, RewardPart, RewardSettings
from async_rl.config.rollout_section import ProgramOptions
from async_rl.config.sections import Config
from tests.support import ROOT

PAGE = ROOT / "docs" / "configuration.md"

HEADER = """# Configuration

A run is one TOML file; every value can be overridden on the command line as `--section.key VALUE` or
`--section.key=VALUE`, at any position. A text key takes the argument unchanged; other values are parsed as TOML or
JSON: `--evaluation.sets '[{"name": "held-out", "source": "rows.jsonl"}]'`. A key of a table has its own dotted name,
as in `--prompts.task_options.min_word_len 5`. Of several values for one key the last one is used. Unknown keys are
errors that name the nearest key. `async-rl run --help` lists all keys; `python -m tests.support.configuration_page`
writes this page from the same descriptions. `[inference]` is of the instances that `async-rl run` starts.
"""

LAYOUTS = """## Layouts of the trainer

A layout is accepted if all of these conditions hold, and otherwise refused before any weight is loaded:

- the ranks are a multiple of `tensor_parallel` x `context_parallel` x `pipeline_parallel`; the quotient is the number
  of replicas;
- `tensor_parallel` divides attention heads, key heads of linear attention, vocabulary and, without experts, the
  feed-forward size; it divides the key / value heads, or is a multiple of their number;
- `context_parallel` divides the attention heads of a tensor-parallel rank; it divides that rank's key / value heads,
  or is a multiple of their number; with linear attention it is 1;
- `pipeline_parallel` x `virtual_pipeline_parallel` is at most the number of layers, and with `pipeline_parallel` = 1
  the latter is 1;
- `expert_parallel` divides the experts and the ranks of a stage (`tensor_parallel` x `context_parallel` x replicas),
  and is 1 without experts.

`recompute`, `frozen_weights` and groups longer than `micro_batch_tokens` work with every layout.
"""

SET_BY_YOU = {
    "run": "dir resume",
    "model": "path dtype",
    "prompts": "source prompts_per_batch max_prompt_tokens columns chat_template system_prompt task_options mixture "
    "held_out",
    "rollout": "responses_per_prompt max_response_tokens program options",
    "reward": "name parts column options num_workers",
    "algorithm": "name options",
    "pipeline": "nodes",
    "optimizer": "learning_rate",
    "train": "iterations epochs",
    "trainer": "device num_processes",
    "checkpoint": "every",
    "inference": "engine python num_instances",
    "evaluation": "sets every",
    "tracking": "trackers project",
    "cluster": "training_nodes env slurm_options",
}
WHEN_TUNING = {
    "run": "seed placement",
    "prompts": "reserve deduplicate curriculum_iterations",
    "rollout": "temperature stop",
    "reward": "timeout_s max_concurrency max_attempts",
    "publish": "transport snapshot_dir timeout_s",
    "pool": "timeout_s request_timeout_s",
    "algorithm": "clip_low clip_high normalize scale_by_std kl_coef kl_estimator kl_in entropy_coef mask_truncated "
    "overlong_tokens old_policy importance teacher teacher_coef",
    "optimizer": "schedule min_learning_rate_ratio warmup_iterations weight_decay clip_grad_norm",
    "train": "steps_per_batch mode order exact router_replay",
    "trainer": "tensor_parallel context_parallel pipeline_parallel virtual_pipeline_parallel expert_parallel recompute "
    "micro_batch_tokens frozen_weights",
    "checkpoint": "keep",
    "inference": "tensor_parallel max_concurrency engine_options",
    "cluster": "max_instances max_restarts",
}
RARELY = "## Rarely"
GROUPS: Mapping[str, Mapping[str, str]] = {
    "## You will set these": SET_BY_YOU,
    "## When tuning": WHEN_TUNING,
}
"""All other keys are set rarely."""

LISTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "[[prompts.mixture]]",
        "One table for each [part of a mixture](data.md#mixtures).",
        MixturePart,
    ),
    (
        "[rollout.options]",
        "Of the rollouts of a [program](rollouts.md); without one they have no effect.",
        ProgramOptions,
    ),
    (
        "[[reward.parts]]",
        "One table for each [reward that is added up](rewards.md#several-rewards). Besides these, a part has the keys "
        "of\n`[reward]`, except `parts` and `column`; those that it leaves out are as there.",
        RewardPart,
    ),
    (
        "[[pipeline.nodes]]",
        "One table for each [function between reward and training](pipeline.md).",
        PipelineNode,
    ),
    (
        "[[evaluation.sets]]",
        "One table for each [set of held-out prompts](evaluation.md), which are rendered, answered and scored as in "
        "training.",
        EvaluationSet,
    ),
)


def configuration_page() -> str:
    """The page as it should be: the keys in their groups, then those of tables, and the accepted layouts."""
    settings = {
        f"{section}.{name}": setting
        for section, field in Config.model_fields.items()
        for name, setting in field.annotation.model_fields.items()  # type: ignore[union-attr]
    }
    chosen = {name: title for title, group in GROUPS.items() for name in names_of(group)}
    sections = [HEADER]
    for title in (*GROUPS, RARELY):
        rows = [row(name, setting) for name, setting in settings.items() if chosen.get(name, RARELY) == title]
        sections.append(f"{title}\n\n{table(rows)}")
    for title, text, model in LISTS:
        inherited = RewardSettings.model_fields.keys() - {"name"} if model is RewardPart else set[str]()
        rows = [row(name, field) for name, field in model.model_fields.items() if name not in inherited]
        sections.append(f"## {title}\n\n{text}\n\n{table(rows)}")
    sections += options_of_rewards()
    return "\n".join([*sections, LAYOUTS])


def names_of(group: Mapping[str, str]) -> list[str]:
    return [f"{section}.{name}" for section, names in group.items() for name in names.split()]


def options_of_rewards() -> Iterator[str]:
    """`[reward.options]`, a table for each kind of reward that has some."""
    for name, model in OPTIONS.items():
        inherited = HTTPOptions.model_fields.keys() if model is JudgeOptions else set[str]()
        rows = [row(key, field) for key, field in model.model_fields.items() if key not in inherited]
        besides = ', besides those of "http"' if inherited else ""
        yield f'## [reward.options] of reward.name = "{name}"{besides}\n\n{table(rows)}'


def table(rows: list[str]) -> str:
    """A table of keys."""
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def row(name: str, setting: FieldInfo) -> str:
    """A key's row."""
    shown = "required" if setting.is_required() else f"`{default_of(setting)}`"
    return f"| `{name}` | {shown} | {setting.description} |"


if __name__ == "__main__":
    PAGE.write_text(configuration_page())
