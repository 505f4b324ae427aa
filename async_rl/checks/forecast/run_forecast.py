"""What a run of a config will need; for `async-rl check`, `async-rl init` and `benchmarks.memory`.

Pure arithmetic on the config and the config.json of its models: no weights are read, nothing is imported that loads
models, and nothing is started.
"""

import math
from dataclasses import dataclass

from async_rl.checks.forecast.instance_memory import instance_memory
from async_rl.checks.forecast.memory import ProcessMemory
from async_rl.checks.forecast.rank_parameters import WEIGHT_BYTES, WIDE_BYTES
from async_rl.checks.forecast.training_memory import group_rows, rank_memory
from async_rl.checks.preflight.adapter import factor_shapes
from async_rl.checks.preflight.model import CRITIC, read_shape
from async_rl.config.sections import Config
from async_rl.shared.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class RunForecast:
    """`rank` and `instance` are peaks of one training rank and of one worker of an instance.

    `publish_bytes` go to each instance at each publish. `max_tokens` is what one iteration trains at most, with
    responses of full length; a program's rollouts count as single answers, since nothing says how long they are.
    """

    model: ModelShape
    num_ranks: int
    rank: ProcessMemory
    instance: ProcessMemory
    publish_bytes: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_fed_rows: int


def forecast_run(config: Config, model: ModelShape) -> RunForecast:
    """The forecast for a run of this model.

    Raises:
        ConfigError: another model of the run cannot be found or is not supported, or the ranks do not form replicas.
    """
    teacher = _other(config.algorithm.teacher, "algorithm.teacher")
    critic = None
    if config.algorithm.traits.values:
        critic = (_other(config.algorithm.critic.critic_path, CRITIC) or model).as_critic()
    num_ranks = config.trainer.num_local_ranks * config.cluster.training_nodes
    prompts, responses = config.prompts.prompts_per_batch, config.rollout.responses_per_prompt
    return RunForecast(
        model=model,
        num_ranks=num_ranks,
        rank=rank_memory(config, model, num_ranks, teacher, critic),
        instance=instance_memory(config, model),
        publish_bytes=_publish_bytes(config, model),
        max_prompt_tokens=prompts * config.prompts.max_prompt_tokens,
        max_response_tokens=prompts * responses * config.rollout.max_response_tokens,
        max_fed_rows=prompts * group_rows(config),
    )


def _publish_bytes(config: Config, model: ModelShape) -> int:
    """To each instance: the weights, or the factors of adapters, in float32, that are published alone."""
    if config.publishes_adapters:
        return WIDE_BYTES * sum(map(math.prod, factor_shapes(config.adapter, model).values()))
    return model.num_parameters * WEIGHT_BYTES[config.model.dtype]


def _other(path: str | None, setting: str) -> ModelShape | None:
    return None if path is None else read_shape(path, setting)
