"""Whether a run may go on from a checkpoint: the settings that decide what it computes must be those it was saved with.

Where and how it computes may change: the layout of the trainer, the pool, publishing, checkpoints, `run.dir`; so may
limits that only end a run. `train.iterations` may change too, which moves the end of the learning rate's decay.
"""

from typing import Any

from async_rl.config import Config, parse_config
from async_rl.errors import ConfigError

_DECIDING = ("model", "prompts", "rollout", "reward", "algorithm", "optimizer", "train")
_MAY_CHANGE = {"train.iterations", "train.max_logprob_gap", "reward.timeout_s", "reward.num_workers"}


def deciding_settings(config: Config) -> dict[str, Any]:
    """Dotted key -> value, of the settings that decide what a run computes."""
    tree = config.model_dump(mode="json")
    settings = {f"{section}.{key}": value for section in _DECIDING for key, value in tree[section].items()}
    settings["run.seed"] = config.run.seed
    return {key: value for key, value in settings.items() if key not in _MAY_CHANGE}


def require_same_run(saved: dict[str, Any], config: Config, checkpoint: str) -> None:
    """Checks that a checkpoint with the config `saved` (as JSON) is one of a run with `config`.

    Raises:
        ConfigError: it is not; names every setting that differs, with both values.
    """
    before = deciding_settings(parse_config(saved, source=f"the config in checkpoint {checkpoint!r}"))
    now = deciding_settings(config)
    differing = [f"{key} is {now[key]!r}, but was {value!r}" for key, value in before.items() if now[key] != value]
    if differing:
        raise ConfigError(
            f"checkpoint {checkpoint!r} belongs to another run:\n  "
            + "\n  ".join(differing)
            + "\nset them back, or give this run a directory of its own (run.dir)"
        )
