"""Whether the longest prompt leaves room for its response: for runs and evaluations, once their instances are known."""

from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.errors import ConfigError
from async_rl.types import Prompt


def require_len(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> int:
    """Checks that every prompt fits into the model of every instance; returns the tokens that an instance has to take.

    Raises:
        ConfigError: some do not: with their longest response, or of a program with a turn.
    """
    if rollout.program != SINGLE_TURN:
        return require_room(rollout, longest, max_model_len)
    require_fit(rollout, longest, max_model_len)
    return len(longest.token_ids) + rollout.max_response_tokens


def require_fit(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> None:
    """Checks that every prompt and its longest response fit into the model of every instance.

    Raises:
        ConfigError: some do not fit; names the prompt and the lengths.
    """
    num_tokens = len(longest.token_ids) + rollout.max_response_tokens
    if max_model_len is not None and num_tokens > max_model_len:
        raise ConfigError(
            f"prompt {longest.prompt_id} has {len(longest.token_ids)} tokens; with rollout.max_response_tokens = "
            f"{rollout.max_response_tokens} that is {num_tokens}, but the instances' model takes {max_model_len}: "
            f"lower prompts.max_prompt_tokens to {max(max_model_len - rollout.max_response_tokens, 0)} "
            "or shorten the responses"
        )


def require_room(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> int:
    """Checks that a program has room for a turn after every prompt; returns the tokens that a turn may need in all.

    Raises:
        ConfigError: it has none after some; names the prompt and the lengths.
    """
    num_tokens = len(longest.token_ids)
    most = min((length for length in (max_model_len, rollout.max_context_tokens) if length), default=num_tokens + 1)
    if num_tokens >= most:
        raise ConfigError(
            f"prompt {longest.prompt_id} has {num_tokens} tokens, which leaves no room for a turn: with all that is "
            f"before it, it has at most {most} (rollout.max_context_tokens, else the instances' model): lower "
            f"prompts.max_prompt_tokens to {most - 1}, or raise rollout.max_context_tokens"
        )
    return most
