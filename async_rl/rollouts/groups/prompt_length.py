"""Whether the longest prompt leaves room for its response: for runs and evaluations, once their instances are known."""

from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.errors import ConfigError
from async_rl.method.types import Prompt


def require_len(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> int:
    """Checks that every prompt fits into the model of every instance, with its longest response, or before a turn.

    Returns:
        The tokens that an instance has to take: of a program those that a turn may need in all.

    Raises:
        ConfigError: some do not fit; names the prompt and the lengths.
    """
    num_prompt, response = len(longest.token_ids), rollout.max_response_tokens
    if rollout.program == SINGLE_TURN:
        num_tokens = num_prompt + response
        if max_model_len is not None and num_tokens > max_model_len:
            raise ConfigError(
                f"prompt {longest.prompt_id} has {num_prompt} tokens; with rollout.max_response_tokens = {response} "
                f"that is {num_tokens}, but the instances' model takes {max_model_len}: lower "
                f"prompts.max_prompt_tokens to {max(max_model_len - response, 0)} or shorten the responses"
            )
        return num_tokens
    most = min(
        (length for length in (max_model_len, rollout.options.max_context_tokens) if length), default=num_prompt + 1
    )
    if num_prompt >= most:
        raise ConfigError(
            f"prompt {longest.prompt_id} has {num_prompt} tokens, which leaves no room for a turn: with all that is "
            f"before it, it has at most {most} (rollout.options.max_context_tokens, else the instances' model): lower "
            f"prompts.max_prompt_tokens to {most - 1}, or raise rollout.options.max_context_tokens"
        )
    return most
