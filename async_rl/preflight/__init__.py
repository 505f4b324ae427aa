"""Checks a config, its model, algorithm, data and reward before a run's processes start; reports all errors together.

It is fast by design: it imports neither torch nor transformers, reads the first rows only, and executes nothing of a
reward. The trainer performs the slower checks, such as the length of every prompt, before it trains.
"""

from collections.abc import Callable

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.preflight.algorithm import require_algorithm, require_other_models
from async_rl.preflight.data import require_evaluation_sets, require_prompts
from async_rl.preflight.exact import require_exact
from async_rl.preflight.model import ModelFiles, require_divisible, require_fit, require_tokens, require_trainable
from async_rl.preflight.paths import require_paths
from async_rl.preflight.reward import require_reward, require_time_for_tests
from async_rl.preflight.reward_rows import require_parts_of_rows
from async_rl.preflight.rollout import require_program

__all__ = ["require_sound"]


def require_sound(config: Config, *, trains: bool, serves: bool) -> None:
    """Runs all checks that are possible before a start.

    Args:
        trains: whether a trainer is started, and not only an evaluation.
        serves: whether instances are started, which get the longest prompt and response that they must accept; if they
            are running already, the trainer compares the longest actual prompt with their limits.

    Raises:
        ConfigError: with one line for each error.
    """
    faults: list[ConfigError] = []
    _note(faults, lambda: _require_model(config, trains, serves))
    _note(faults, lambda: require_reward(config.reward))
    _note(faults, lambda: require_program(config.rollout))
    _note(faults, lambda: require_evaluation_sets(config))
    _note(faults, lambda: require_parts_of_rows(config, trains=trains))
    if trains:
        _note(faults, lambda: require_prompts(config.prompts))
        _note(faults, lambda: require_time_for_tests(config))
        _note(faults, lambda: require_algorithm(config.algorithm))
        _note(faults, lambda: require_paths(config))
    if len(faults) == 1:
        # Of its own class: a directory in use may be free later.
        raise faults[0]
    if faults:
        raise ConfigError("\n".join(map(str, faults)))


def _require_model(config: Config, trains: bool, serves: bool) -> None:
    files = ModelFiles.find(config.model.path)
    faults: list[ConfigError] = []
    if trains:
        _note(faults, lambda: require_trainable(config, files))
    if trains:
        _note(faults, lambda: require_exact(config, files))
        _note(faults, lambda: require_other_models(config, files, serves=serves))
    if trains and serves:
        _note(faults, lambda: require_divisible(config, files))
    if serves:
        _note(faults, lambda: require_fit(config, files))
    _note(faults, lambda: require_tokens(config, files))
    if faults:
        raise ConfigError("\n".join(map(str, faults)))


def _note(faults: list[ConfigError], check: Callable[[], None]) -> None:
    try:
        check()
    except ConfigError as fault:
        faults.append(fault)
    except OSError as error:
        # A path that is too long, or below a directory that may not be read.
        faults.append(ConfigError(f"{error.filename!r} cannot be read: {error.strerror}; name another path"))
