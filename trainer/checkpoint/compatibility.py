"""Whether a run may resume from a checkpoint, with the settings that its algorithm has where they are left to it.

What is compared, and what may change: `async_rl/checks/preflight/resume.py`.
"""

from functools import partial
from typing import Any

from async_rl.checks.preflight import resume
from async_rl.config.sections import Config
from async_rl.method.algorithms import ALGORITHMS


def settings_of_algorithm(config: Config) -> dict[str, Any]:
    """See `resume.OfAlgorithm`."""
    algorithm = ALGORITHMS[config.algorithm.name](config.algorithm, config.rollout.max_response_tokens)
    options = {f"algorithm.options.{key}": value for key, value in algorithm.options.model_dump().items()}
    names = ("clip_low", "clip_high", "normalize", "scale_by_std")
    return options | {f"algorithm.{name}": getattr(algorithm, name) for name in names}


require_same_run = partial(resume.require_same_run, of_algorithm=settings_of_algorithm)
"""Of every setting, those of the algorithm among them."""
