"""What an algorithm needs of a run's settings, as it says itself: for a user's own one, which no config knows."""

from async_rl.algorithms import Needs
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.critic_section import NO_CRITIC, CriticSection
from async_rl.config.train_section import TrainSection
from async_rl.errors import ConfigError


def require_possible(needs: Needs, config: AlgorithmSection, train: TrainSection, critic: CriticSection) -> None:
    """Checks that the config provides what an algorithm needs; of the built-in ones the config has been checked.

    Raises:
        ConfigError: it does not; names the setting.
    """
    if needs.totals and train.mode != "synchronous":
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs the totals of the whole batch before the first advantage, but "
            f"train.mode is {train.mode!r}: set it to 'synchronous'"
        )
    if needs.totals and needs.reward_kl:
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs the totals of the whole batch before the reference has scored "
            "the first rollout, and a KL in the reward: set algorithm.kl_in to 'loss'"
        )
    if needs.reward_kl and not needs.reference:
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs a KL in the reward, but no reference, which it is to: say so in "
            "its `needs`"
        )
    if needs.teacher and config.teacher is None:
        raise ConfigError(
            f"algorithm.name = {config.name!r} needs a teacher, but algorithm.teacher is not set: name its checkpoint"
        )
    if critic != NO_CRITIC and not needs.values:
        raise ConfigError(f"algorithm.name = {config.name!r} needs no critic's values, but [critic] is set: remove it")
