"""The command line of `async-rl eval`, and the config that it stands for; for `evaluate.py`."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.records.run_records import METRICS
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.protocol.adapter import CONFIG_FILE

CONFIG_SUFFIX = ".toml"

DEFAULTS: Mapping[str, Any] = {
    "program": SINGLE_TURN,
    "samples": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_tokens": 512,
    "engine": "transformers",
    "num_instances": 1,
}
"""Of the options that stand for keys, none of which may be given beside a config."""

OF_A_RUN = ("checkpoints", METRICS, "manifest.json")
"""What a run's directory has, or one of its checkpoints."""

OF_A_MODEL = ("base", "data", "reward", "max_prompts", "instances", *DEFAULTS)

OF_DATA = ("data", "reward", "program", "samples", "temperature", "top_p", "top_k", "max_prompts")
"""Which the tasks of --harness have themselves."""

OF_HARNESS = ("harness_tasks", "limit", "apply_chat_template")

HARNESS_TOKENS = 256
"""lm-eval's own default for the responses of a task that does not say how long they may be."""

HARNESS_PROMPT_TOKENS = 3840
"""Enough for most tasks with five examples; what is longer, lm-eval cuts at its beginning."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, and the config overrides."""
    parser = Parser(
        "async-rl eval",
        "Samples a model on held-out prompts and scores its responses: avg@k and pass@k with confidence intervals, "
        "mean reward, lengths. The options below set keys of the config by shorter names; other keys, such as "
        "--prompts.chat_template false, can be set too.",
        "(MODEL (--data SOURCE [--reward NAME] | --harness TASKS) | CONFIG.toml) [OPTIONS] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face checkpoint: a directory or a hub name; a run's directory, whose newest checkpoint it is, or "
        "a checkpoint in it; a directory with adapters that peft has saved; or a config, CONFIG.toml, with "
        "[[evaluation.sets]]",
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="where the base of adapters, or of a run, is now, if not where they say"
    )
    parser.add_argument(
        "--data", action="append", help="as prompts.source, such as rows.jsonl; may be given several times"
    )
    parser.add_argument(
        "--reward",
        help="a built-in one, such as math, or python:path/to/file.py:function; none if a program rewards itself",
    )
    parser.add_argument(
        "--program",
        help="python:path/to/file.py:function or command:PROGRAM ARGUMENTS, each of whose runs is a sample; by default "
        "a single response",
    )
    parser.add_argument("--samples", type=int, help="responses to each prompt (default: 1)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 1.0)")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens up to this mass (default: 1.0)")
    parser.add_argument("--top-k", type=int, help="sample from so many likeliest tokens (default: 0, all)")
    parser.add_argument("--max-tokens", type=int, help="of a response, or of all turns of a program (default: 512)")
    parser.add_argument("--max-prompts", type=int, help="take the first so many rows only")
    parser.add_argument(
        "--instances", help="base URLs of running instances, with commas between; else it starts its own"
    )
    parser.add_argument("--engine", help="of its own: transformers or vllm (default: transformers)")
    parser.add_argument("--num-instances", type=int, help="of its own (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as one JSON object to this file")
    parser.add_argument(
        "--harness",
        metavar="TASKS",
        help="tasks of lm-eval in place of --data, with commas between, such as gsm8k,arc_easy; --out is then a "
        "directory for the files that lm-eval writes",
    )
    parser.add_argument("--harness-tasks", type=Path, metavar="DIR", help="with task files of your own for --harness")
    parser.add_argument("--limit", type=int, help="with --harness: take the first so many rows of each task only")
    parser.add_argument(
        "--apply-chat-template",
        action="store_true",
        default=None,
        help="with --harness: apply the chat template, as a CONFIG.toml does unless prompts.chat_template is false",
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, on the last line")
    return parser.parse_args(argv), parser.overrides


def config_path(options: argparse.Namespace) -> Path | None:
    """The config that was named in place of a model, if one was.

    Raises:
        ConfigError: an option stands beside it that sets one of its keys; or a model stands without --data.
    """
    _require_fitting(options)
    if not options.model.endswith(CONFIG_SUFFIX):
        if not options.data and not options.harness:
            raise ConfigError(f"--data is missing: name what {options.model!r} is evaluated on")
        return None
    given = [name for name in OF_A_MODEL if getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} stands beside the config {options.model!r}, which has that itself: change "
            "it there, or set its key (--section.key VALUE)"
        )
    return Path(options.model)


def _require_fitting(options: argparse.Namespace) -> None:
    """Options with --harness, or without, that have no effect there are errors."""
    given = [name for name in (OF_DATA if options.harness else OF_HARNESS) if getattr(options, name) is not None]
    if given:
        name = f"--{given[0].replace('_', '-')}"
        raise ConfigError(
            f"{name} stands beside --harness, whose tasks have that themselves: leave it out"
            if options.harness
            else f"{name} is for --harness: name its tasks, or leave {name} out"
        )
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit is {options.limit}: expected a number of rows from 1 on")


def name_of(options: argparse.Namespace, config: Config) -> str:
    """What results call the model: a config's, unless adapters are put beside it."""
    is_the_configs = options.model.endswith(CONFIG_SUFFIX) and config.adapter.path is None
    return config.model.path if is_the_configs else options.model


def harness_words(options: argparse.Namespace, config: Config) -> list[str]:
    """The arguments of `async_rl.evaluation.harness`, of a named config or one that the options stand for."""
    given = {
        "tasks": options.harness,
        "include": options.harness_tasks,
        "limit": options.limit,
        "results": options.out,
        "name": name_of(options, config),
    }
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    is_named = options.model.endswith(CONFIG_SUFFIX)
    is_chat = options.apply_chat_template or (is_named and config.prompts.chat_template is not False)
    return [*words, *(["--chat-template"] if is_chat else [])]


def require_reward(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Checks that something scores the responses of a model that is named without a config.

    Raises:
        ConfigError: nothing does.
    """
    if (
        options.harness
        or options.reward
        or options.program
        or any(word.startswith(("--reward.", "--rollout.program=")) for word in overrides)
    ):
        return
    raise ConfigError(
        "--reward is missing: name what scores the responses, such as --reward math or another built-in one "
        "(docs/rewards.md), or --reward python:path/to/file.py:function; only a --program may reward itself"
    )


def export_words(options: argparse.Namespace) -> list[str] | None:
    """The arguments of `trainer.export` that make a checkpoint of what was named; None if it is one.

    Adapters are merged in float32: what loads the checkpoint rounds once, to the dtype that it computes with.

    Raises:
        ConfigError: a base is named beside a checkpoint.
    """
    base = [] if options.base is None else ["--model", options.base]
    kind = _kind_of(Path(options.model))
    if kind == CONFIG_FILE:
        return [options.model, "--merge", "--dtype", "float32", *base]
    if kind is not None:
        return [options.model, "--merge", *base]
    if base:
        raise ConfigError(f"--base is for adapters and runs, and {options.model!r} is neither: leave it out")
    return None


def _kind_of(path: Path) -> str | None:
    """The file or directory by which it is adapters, a run or its checkpoint; None of what else it may be."""
    try:
        if any(path.glob("*.safetensors")) and not (path / CONFIG_FILE).is_file():
            return None
        return next((name for name in (CONFIG_FILE, *OF_A_RUN) if (path / name).exists()), None)
    except OSError:
        # Too long, or below a directory that may not be read: what reads a checkpoint names it.
        return None


def config_text(options: argparse.Namespace, run_dir: Path, model: str | None = None) -> str:
    """The options as a config in TOML, with an evaluation set for each source; `model` is a checkpoint that was made of
    the named one."""
    chosen = {
        name: default if (value := getattr(options, name)) is None else value for name, default in DEFAULTS.items()
    }
    values = {
        "run.dir": str(run_dir),
        "model.path": model or options.model,
        "prompts.source": (options.data or ["harness.jsonl"])[0],
        "prompts.prompts_per_batch": 1,
        "rollout.program": chosen["program"],
        "rollout.max_response_tokens": chosen["max_tokens"],
        "pool.instances": options.instances.split(",") if options.instances else [],
        "train.iterations": 1,
        "inference.engine": chosen["engine"],
        "inference.num_instances": chosen["num_instances"],
    }
    if options.harness:
        values["reward.name"] = "exact"
        values["prompts.max_prompt_tokens"] = HARNESS_PROMPT_TOKENS
        values["rollout.max_response_tokens"] = options.max_tokens or HARNESS_TOKENS
    elif options.reward is not None:
        values["reward.name"] = options.reward
    of_each = {
        "num_samples": chosen["samples"],
        "temperature": chosen["temperature"],
        "top_p": chosen["top_p"],
        "top_k": chosen["top_k"],
        **({} if options.max_prompts is None else {"max_prompts": options.max_prompts}),
    }
    sources = options.data or []
    names = set_names(sources)
    sets = [{"name": name, "source": source, **of_each} for name, source in zip(names, sources, strict=True)]
    return _toml_lines(values) + "".join(f"\n[[evaluation.sets]]\n{_toml_lines(each)}" for each in sets)


def set_names(sources: Sequence[str]) -> list[str]:
    """The name of each source's set: the file's name without its suffix, or the task's or the split's name; a number
    after one that is taken."""
    names: list[str] = []
    for source in sources:
        stem = (
            Path(source).stem
            if source.endswith((".jsonl", ".json", ".csv", ".parquet"))
            # A colon in brackets is a slice of a split.
            else re.split(r":(?![^\[]*\])", source)[-1]
        )
        name = base = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-") or "data"
        number = 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def _toml_lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: Any) -> str:
    """JSON's strings, numbers and lists are TOML's, but for the names of what is no number: the config refuses them."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
