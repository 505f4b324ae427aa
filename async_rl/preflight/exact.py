"""What `train.exact` needs: a rule without torch, checked before a start, and again by the trainer."""

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.preflight.model import ModelFiles


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
        "trainer.pipeline_parallel": (config.trainer.pipeline_parallel, 1),
    }
    for key, (value, expected) in needed.items():
        if value != expected:
            raise ConfigError(
                f"train.exact needs {key} = {expected!r}, not {value!r}: change it, or set train.exact to false"
            )
    family = str(files.config.get("model_type"))
    if family.endswith("_moe"):
        raise ConfigError(
            f"train.exact is for models without experts, and model.path {files.name!r} is of {family!r}: set "
            "train.exact to false"
        )
