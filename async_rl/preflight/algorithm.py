"""Checks the algorithm's settings, a user's own one, and checkpoints of teacher and critic.

Nothing of them is executed or loaded.
"""

from async_rl.config.algorithm_options import require_used
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.preflight.layout import require_layout
from async_rl.preflight.model import ModelFiles, require_supported
from async_rl.preflight.user_file import require_class

TEACHER = "algorithm.teacher"
CRITIC = "critic.path"


def require_algorithm(config: AlgorithmSection) -> None:
    """Checks that a user's own algorithm is a class of its file, and what is set for a built-in one.

    Raises:
        ConfigError: it is no class of its file, named with the line where possible; a built-in one does not have these
            options, or does not use a setting.
    """
    if config.is_own:
        require_class("algorithm.name", config.name)
    else:
        require_used(config)


def require_other_models(config: Config, policy: ModelFiles, *, serves: bool, is_whole: bool = True) -> None:
    """Checks that `algorithm.teacher` and `critic.path`, where set, can read the policy's tokens on the ranks.

    Args:
        serves: whether these ranks are those of the config.
        is_whole: without it weights and tokenizer may be missing.

    Raises:
        ConfigError: one cannot; names the setting.
    """
    for setting, name in ((TEACHER, config.algorithm.teacher), (CRITIC, config.critic.path)):
        if name is None:
            continue
        model = ModelFiles.find(name, setting, is_whole=is_whole)
        require_supported(model, is_whole=is_whole)
        if serves:
            num_ranks = config.trainer.num_local_ranks * config.cluster.training_nodes
            require_layout(config.trainer, model.shape, num_ranks)
        own, expected = model.shape.vocab_size, policy.config.get("vocab_size")
        if own != expected:
            raise ConfigError(
                f"{model.named} has a vocabulary of {own} tokens, model.path {policy.name!r} one of "
                f"{expected}: it reads the policy's tokens; name a checkpoint with the same tokenizer"
            )
