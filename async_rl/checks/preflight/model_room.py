"""Whether the lengths and the tokens that a config names are some that its model has."""

from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.sections import Config
from async_rl.errors import ConfigError


def with_room(config: Config, files: ModelFiles) -> Config:
    """The config with no longer prompts than the model has positions for beside a response, or before a turn.

    For a program that measures the rows and names one that does not fit: the limit alone is no fault. A config whose
    responses leave no room at all stays as it is.
    """
    positions, rollout = files.max_positions, config.rollout
    if positions is None:
        return config
    if rollout.program == SINGLE_TURN:
        most = positions - rollout.max_response_tokens
    else:
        most = min(positions, rollout.options.max_context_tokens or positions) - 1
    if not 0 < most < config.prompts.max_prompt_tokens:
        return config
    return config.model_copy(update={"prompts": config.prompts.model_copy(update={"max_prompt_tokens": most})})


def require_fit(config: Config, files: ModelFiles) -> None:
    """Checks that the longest prompt and response fit into the model; of a program, whose turns end there, the prompt.

    Raises:
        ConfigError: they do not.
    """
    positions, context = files.max_positions, config.rollout.options.max_context_tokens
    if positions is not None and context is not None and context > positions:
        raise ConfigError(
            f"rollout.options.max_context_tokens is {context}, more than the model's {positions} positions "
            f"(max_position_embeddings of model.path {files.name!r}): lower it"
        )
    prompt, response = config.prompts.max_prompt_tokens, config.rollout.max_response_tokens
    if config.rollout.program != SINGLE_TURN:
        most = min((length for length in (context, positions) if length is not None), default=None)
        if most is not None and prompt >= most:
            raise ConfigError(
                f"prompts.max_prompt_tokens = {prompt} leaves no room for a turn: with all that is before it, it has "
                f"at most {most} tokens (rollout.options.max_context_tokens, else the model's positions): lower "
                f"prompts.max_prompt_tokens to {most - 1} at most, or raise rollout.options.max_context_tokens"
            )
        return
    if positions is not None and prompt + response > positions:
        remedy = (
            f"lower prompts.max_prompt_tokens to at most {positions - response}, or the responses"
            if positions > response
            else f"lower rollout.max_response_tokens below {positions}, and leave room for prompts"
        )
        raise ConfigError(
            f"prompts.max_prompt_tokens = {prompt} and rollout.max_response_tokens = {response} make sequences of "
            f"{prompt + response} tokens, more than the model's {positions} positions (max_position_embeddings of "
            f"model.path {files.name!r}): {remedy}"
        )


def require_tokens(config: Config, files: ModelFiles) -> None:
    """Checks that stop tokens are tokens of the model.

    Raises:
        ConfigError: one is not.
    """
    vocabulary = files.config.get("vocab_size")
    stops = {"rollout.stop": config.rollout.stop_token_ids}
    stops |= {
        f"stop_token_ids of prompts.mixture {part.name!r}": part.stop_token_ids for part in config.prompts.mixture
    }
    for setting, tokens in stops.items():
        outside = [token for token in tokens if isinstance(vocabulary, int) and token >= vocabulary]
        if outside or min(tokens, default=0) < 0:
            raise ConfigError(
                f"{setting} is {list(tokens)}, but tokens of model.path "
                f"{files.name!r} are 0 to {vocabulary - 1 if isinstance(vocabulary, int) else '...'}: "
                "look the ids up in its tokenizer"
            )
