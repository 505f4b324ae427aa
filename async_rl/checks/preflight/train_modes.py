"""Whether a model can be trained as `train.exact` and `train.router_replay` demand."""

from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.sections import Config
from async_rl.errors import ConfigError

ROUTES_OPTION = "--enable-return-routed-experts"
"""Of vLLM's server, from 0.32 on: responses say which experts their tokens were sent to."""


def require_exact(config: Config, files: ModelFiles) -> None:
    """Checks that trainer and instances can compute the same bits, if `train.exact` demands it.

    Raises:
        ConfigError: they cannot; names the setting, its value and the one that is needed.
    """
    if not config.train.exact:
        return
    needed: dict[str, tuple[object, object]] = {
        "trainer.device": (config.trainer.device, "cpu"),
        "model.dtype": (config.model.dtype, "float32"),
        "inference.engine": (config.inference.engine, "transformers"),
        "trainer.tensor_parallel": (config.trainer.tensor_parallel, 1),
        "trainer.context_parallel": (config.trainer.context_parallel, 1),
        "trainer.pipeline_parallel": (config.trainer.pipeline_parallel, 1),
        "adapter.rank": (config.adapter.rank, None),
    }
    for key, (value, expected) in needed.items():
        if value != expected:
            raise ConfigError(
                f"train.exact needs {key} = {expected!r}, not {value!r}: change it, or set train.exact to false"
            )
    shape, kind = files.shape, f"is of {files.config['model_type']!r}"
    without = {
        "experts": kind if shape.experts else None,
        "linear attention": kind if shape.delta else None,
        "other activations than SiLU": kind if shape.has_gelu else None,
        "windows": f"has sliding_window {shape.window}" if shape.window else None,
    }
    for what, found in without.items():
        if found:
            raise ConfigError(
                f"train.exact is for models without {what}, and model.path {files.name!r} {found}: set train.exact to "
                "false"
            )


def require_router_replay(config: Config, files: ModelFiles) -> None:
    """Checks that there are routes to replay, if `train.router_replay` demands it.

    Raises:
        ConfigError: there are none; names the setting, its value and the one that is needed.
    """
    if not config.train.router_replay:
        return
    if files.shape.experts is None:
        raise ConfigError(
            f"train.router_replay is for models with experts, and {files.named} has none: set it to false"
        )
    starts_vllm = config.inference.engine == "vllm" and not config.pool.instances
    if starts_vllm and ROUTES_OPTION not in config.inference.engine_options:
        raise ConfigError(
            f'train.router_replay needs instances that report their routes: add "{ROUTES_OPTION}" to '
            "inference.engine_options"
        )
