"""The bearer token of a reward's service, apart from `service.py`: a check of a run needs no HTTP client."""

import os
from pathlib import Path

from async_rl.config.reward_section import HTTPOptions
from async_rl.errors import ConfigError


def read_token(options: HTTPOptions) -> str | None:
    """The bearer token, if one is set.

    Raises:
        ConfigError: it cannot be read, or is no token.
    """
    if options.token_from is None:
        return None
    kind, _, place = options.token_from.partition(":")
    try:
        token = os.environ[place] if kind == "env" else Path(place).read_text(encoding="utf-8")
    except KeyError as error:
        raise ConfigError(
            f"reward.options.token_from is {options.token_from!r}, but there is no such variable in the "
            "environment: set it where the trainer is started"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward.options.token_from is {options.token_from!r}, which cannot be read: {error}"
        ) from error
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"reward.options.token_from is {options.token_from!r}, where there is no token: expected one line"
        )
    return token
