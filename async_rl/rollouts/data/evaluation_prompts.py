"""What the prompts of an evaluation set are: how its source is read, from the settings of the training prompts."""

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.prompts_section import PromptsSection

HELD_OUT = "held-out"
"""The source of a set that has the prompts which are held out of training."""


def prompts_of_set(config: EvaluationSet, prompts: PromptsSection) -> PromptsSection:
    """The settings of a set with a source of its own: rendered like the training prompts, every row used."""
    options = prompts.task_options if config.source == prompts.source else {}
    size = config.max_prompts or prompts.task_options.get("size")
    return prompts.model_copy(
        update={
            "source": config.source,
            "mixture": (),
            "columns": prompts.columns if config.columns is None else config.columns,
            # A task's rows are generated from a seed: with the run's own they would be the training rows.
            "task_options": {key: value for key, value in options.items() if key not in ("seed", "size")}
            | ({"size": size} if size else {}),
        }
    )
