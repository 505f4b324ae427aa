"""Scores a model on rows, as `async-rl eval` does."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from typing_extensions import Unpack

from async_rl.api.command import Command, open_log
from async_rl.api.inputs import Inputs
from async_rl.api.settings import Tree, tree_of
from async_rl.config.keys import find_key, nearest
from async_rl.config.sections import Config
from async_rl.config.toml_text import toml_value
from async_rl.errors import ConfigError
from async_rl.shared.files import temporary_directory

GRACE_S = 10.0


class EvaluationOptions(TypedDict, total=False):
    """Of `async-rl eval`; `settings` are sections of a config."""

    program: Any
    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    max_prompts: int
    engine: str
    num_instances: int
    base: str
    quiet: bool
    settings: Mapping[str, Mapping[str, Any]]


def evaluate(
    model: str | os.PathLike[str], data: Any, reward: Any = None, **options: Unpack[EvaluationOptions]
) -> dict[str, Any]:
    """Samples responses to rows and scores them: figures with confidence intervals, as `async-rl eval` prints them.

    Args:
        model: a Hugging Face checkpoint, the folder of a run, or one with adapters that peft has saved.
        data: see `train`.
        reward: see `train`; None where `program` rewards itself.
        options: `samples` to each prompt, `temperature`, `top_p`, `top_k`, `max_tokens`, `max_prompts`, and others.

    Raises:
        ConfigError: something of this cannot work.
        AsyncRLError: the evaluation failed.
    """
    given = dict(options)
    quiet, settings, program = (given.pop(name, None) for name in ("quiet", "settings", "program"))
    for name in given.keys() - EvaluationOptions.__annotations__.keys():
        near = nearest(name, list(EvaluationOptions.__annotations__))
        raise ConfigError(
            f"unknown option {name!r}: {f'did you mean {near!r}? ' if near else ''}there are "
            f"{', '.join(EvaluationOptions.__annotations__)}"
        )
    if data is None:
        raise ConfigError("data is missing: give a path, a list of rows, or a data set")
    if not isinstance(settings, Mapping | None):
        raise ConfigError(f"settings is {settings!r:.200}: expected sections of a config, as {{'prompts': {{...}}}}")
    with temporary_directory("async-rl-python-") as directory:
        inputs = Inputs(directory)
        tree = inputs.take(tree_of(None, settings or {}, data=data, reward=reward, program=program))
        inputs.write(None)
        results = directory / "results.json"
        words = [str(model), "--data", str(tree["prompts"].pop("source")), "--out", str(results)]
        words += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        words += _words_of(tree)
        with open_log(directory / "eval.log") as log:
            command = Command("eval", words, log, grace_s=GRACE_S, shows=not quiet)
        finished(command)
        found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))["sets"][0]
        return found


def of_run(config: Config, reward: Any) -> EvaluationOptions:
    """How a run renders its prompts, ends responses and, unless there is another `reward`, scores them."""
    tree = config.model_dump(exclude_unset=True)
    taken = {"prompts": ("columns", "chat_template", "system_prompt", "max_prompt_tokens")}
    settings = {name: {k: v for k, v in tree.get(name, {}).items() if k in keys} for name, keys in taken.items()}
    if reward is None:
        settings["reward"] = tree.get("reward", {})
    limit = config.rollout.max_response_tokens
    return {"settings": settings, "program": tree.get("rollout", {}).get("program"), "max_tokens": limit}


def finished(command: Command) -> None:
    """Waits for a command's end; an interrupt ends it.

    Raises:
        AsyncRLError: it failed.
    """
    try:
        command.wait()
    except BaseException:
        command.end()
        raise
    if (error := command.failure()) is not None:
        raise error


def _words_of(tree: Tree) -> Iterator[str]:
    """Keys of a config as words of a command line."""
    for section, keys in tree.items():
        for name, value in keys.items():
            key = find_key(Config, f"{section}.{name}")
            is_text = isinstance(value, str) and key is not None and key.is_text
            if value is not None:
                yield f"--{section}.{name}={value if is_text else toml_value(value)}"
