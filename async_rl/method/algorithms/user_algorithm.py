"""A user's own algorithm, the class of `algorithm.name = "python:path/to/file.py:Class"`.

Unlike rewards and rollout programs it runs in the trainer's own process: its loss is part of the backward pass.
"""

from typing import Any

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.errors import ConfigError
from async_rl.method.algorithms.base import Algorithm
from async_rl.shared.programs.user_file import find_file, load_class_from_file, traceback_from

SETTING = "algorithm.name"
INTERFACE = tuple(name for name in vars(Algorithm) if not name.startswith("_"))


def load_algorithm(config: AlgorithmSection, max_response_tokens: int) -> Algorithm:
    """Makes the user's algorithm, which gets the same arguments as the built-in ones.

    Raises:
        ConfigError: there is no such class, it cannot be made, or it is no `Algorithm`.
    """
    made = _make(config, max_response_tokens)
    if missing := [name for name in INTERFACE if not hasattr(made, name)]:
        raise ConfigError(
            f"{SETTING} {config.name!r} has no {', '.join(missing)}: derive it from "
            "async_rl.method.algorithms.PolicyGradient, or write what async_rl.method.algorithms.Algorithm names"
        )
    algorithm: Algorithm = made
    return algorithm


def _make(config: AlgorithmSection, max_response_tokens: int) -> Any:
    found = load_class_from_file(SETTING, config.name)
    try:
        return found(config, max_response_tokens)
    except ConfigError:
        raise
    except Exception as error:
        path, _ = find_file(SETTING, config.name)
        raise ConfigError(
            f"{SETTING} {config.name!r}: making it with (config, max_response_tokens) failed:\n"
            f"{traceback_from(path, error)}"
        ) from error
