"""Checks of a finished group before it is trained; for `trainer.trainer`."""

from async_rl.errors import ConfigError, RewardError
from async_rl.rewards.base import LARGEST_REWARD, is_reward
from async_rl.types import Group
from trainer.batching.group_slice import num_rows


def require_one_micro_batch(group: Group, micro_batch_tokens: int, algorithm: str) -> None:
    """
    Raises:
        ConfigError: the group has more than `micro_batch_tokens` rows.
    """
    if num_rows(group) > micro_batch_tokens:
        raise ConfigError(
            f"group {group.index} (prompt {group.prompt.prompt_id!r}) has {num_rows(group)} rows, but "
            f"trainer.micro_batch_tokens is {micro_batch_tokens} and algorithm.name = {algorithm!r} compares "
            "rollouts of a whole group: raise trainer.micro_batch_tokens, or lower rollout.responses_per_prompt or "
            "rollout.max_response_tokens"
        )


def require_known_tokens(group: Group, vocab_size: int) -> None:
    """
    Raises:
        ConfigError: a token id is outside the vocabulary.
    """
    sequences = [*group.responses_by_prompt, *(response.token_ids for response in group.responses)]
    highest = max(max(token_ids, default=0) for token_ids in sequences)
    if highest >= vocab_size:
        raise ConfigError(
            f"group {group.index} (prompt {group.prompt.prompt_id!r}) has token id {highest}, but the model's "
            f"vocabulary ends at {vocab_size - 1}: prompts and instances must use its tokenizer"
        )


def require_finite_rewards(group: Group) -> None:
    """A reward that is not finite would make the gradient of the whole batch unusable, without showing its source.

    Raises:
        RewardError: a reward is not finite.
    """
    for reward in group.rewards:
        if not is_reward(reward):
            raise RewardError(
                f"group {group.index} (prompt {group.prompt.prompt_id!r}) has the reward {reward}: expected a finite "
                f"number of at most {LARGEST_REWARD:g}; correct the reward function"
            )
