"""The settings that rewards behind HTTP need; read without connecting, by the pre-flight too."""

import os
from pathlib import Path

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError


def url_of(config: RewardSection) -> str:
    """
    Raises:
        ConfigError: there is none.
    """
    if config.url is None:
        raise ConfigError(f"reward {config.name!r} needs a service: set reward.url")
    return config.url


def model_of(config: RewardSection) -> str:
    """
    Raises:
        ConfigError: none is set.
    """
    if config.model is None:
        raise ConfigError(f"reward {config.name!r} needs a model: set reward.model to its name at the server")
    return config.model


def read_token(config: RewardSection) -> str | None:
    """The bearer token, if one is set.

    Raises:
        ConfigError: it cannot be read, or is no token.
    """
    if config.token_from is None:
        return None
    kind, _, place = config.token_from.partition(":")
    try:
        token = os.environ[place] if kind == "env" else Path(place).read_text(encoding="utf-8")
    except KeyError as error:
        raise ConfigError(
            f"reward.token_from is {config.token_from!r}, but there is no such variable in the environment: set it "
            "where the trainer is started"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward.token_from is {config.token_from!r}, which cannot be read: {error}") from error
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"reward.token_from is {config.token_from!r}, where there is no token: expected one line")
    return token
