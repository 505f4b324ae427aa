"""Checks that a reward exists and has what it needs; nothing of it is executed."""

import ast
import logging
import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

from async_rl.checks.preflight.user_file import PREFIX, require_function, signature_of
from async_rl.config.reward_section import BUILT_IN, OPTIONS, CodeOptions, HTTPOptions, JudgeOptions, RewardSection
from async_rl.config.secrets import masked_text
from async_rl.config.section import NoOptions
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.base import USED_SHARE
from async_rl.rollouts.rewards.built_in import EXPECTED, PACKAGES
from async_rl.rollouts.rewards.rubric import rubric_text
from async_rl.rollouts.rewards.service_token import read_token
from async_rl.rollouts.rewards.signatures import form_of
from async_rl.shared.programs.parts import load_part


def require_reward(config: RewardSection) -> None:
    """Checks that the reward, if there is one, or each of its parts, exists and has its settings, files and packages.

    Raises:
        ConfigError: one does not; for a `python:` reward it names the file and, if possible, the line.
    """
    faults: list[str] = []
    for label, alone in config.single_rewards.items():
        try:
            _require(alone, alone.name or "")
        except ConfigError as error:
            faults.append(f"[[reward.parts]] {label!r}: {error}" if config.parts else str(error))
    if faults:
        raise ConfigError("\n".join(faults))


def require_time_for_tests(config: Config) -> None:
    """Checks for the reward `code` that each response of a group has the time of at least one of its tests.

    Raises:
        ConfigError: `reward.timeout_s` is too short.
    """
    num_responses = config.rollout.responses_per_prompt
    for reward in config.reward.single_rewards.values():
        if reward.name != "code":
            continue
        test_timeout_s = reward.read_options(CodeOptions).test_timeout_s
        needed_s = num_responses * test_timeout_s / USED_SHARE
        if reward.timeout_s < needed_s:
            raise ConfigError(
                f"reward.timeout_s = {reward.timeout_s:g} is too short for one test of {test_timeout_s:g} s "
                f"(reward.options.test_timeout_s) in each of {num_responses} responses: set it to at least "
                f"{needed_s:.4g}"
            )


def _require(config: RewardSection, name: str) -> None:
    if name.startswith(PREFIX):
        definition = require_function("reward.name", name)
        if definition is not None and not definition.decorator_list:
            _require_form(name, definition)
    elif name not in BUILT_IN:
        raise ConfigError(f"reward.name is {name!r}: expected {EXPECTED}")
    options = config.read_options(OPTIONS.get(name, NoOptions))
    if isinstance(options, JudgeOptions):
        rubric_text(options.rubric)
    if isinstance(options, HTTPOptions):
        read_token(options)
        warn_if_unreachable("reward.options.url", options.url)
    if name == "code":
        load_part("sandbox", "probe").require_installed()
    elif name in PACKAGES and find_spec(PACKAGES[name].replace("-", "_")) is None:
        raise ConfigError(f"reward.name {name!r} needs {PACKAGES[name]}: install async-rl[tasks]")


def _require_form(name: str, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    try:
        form_of(signature_of(definition))
    except ValueError as error:
        raise ConfigError(
            f"reward.name {name!r}: line {definition.lineno}: {error}; write it in one of these forms"
        ) from error


log = logging.getLogger(__name__)

TIMEOUT_S = 2.0

PORTS = {"http": 80, "https": 443}


def warn_if_unreachable(setting: str, url: str) -> None:
    """Connects to the URL, the value of `setting`, and logs a warning if that fails."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), TIMEOUT_S):
            return
    except (OSError, UnicodeError) as error:
        log.warning(
            "%s is %r, which cannot be reached from here (%s): start the service before it is needed",
            setting,
            masked_text(url),
            error,
        )
