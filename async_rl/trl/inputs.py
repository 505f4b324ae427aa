"""The model, the tokenizer and the data sets that a script gives, as far as a run can take them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.api.inputs import require_rows
from async_rl.checks.preflight.model import ModelFiles
from async_rl.errors import ConfigError

ROOM, TEMPLATE_ROOM = 8, 1024
"""Tokens that a tokenizer, or a chat template, may put around a prompt; its own have at least a byte each."""


def model_name(model: Any, processing_class: Any) -> str:
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a folder, model.save_pretrained(FOLDER), or a name of the hub; "
            "ranks load it themselves"
        )
    name = str(model)
    tokenizer = getattr(processing_class, "name_or_path", name)
    if tokenizer != name and Path(tokenizer).absolute() != Path(name).absolute():
        raise ConfigError(
            f"processing_class is of {tokenizer!r}, model is {name!r}: prompts have the model's own tokenizer; save "
            "both to one folder, and name that"
        )
    if hasattr(processing_class, "get_vocab"):
        _require_same(processing_class, name)
    return name


def _require_same(processing_class: Any, name: str) -> None:
    """Raises ConfigError unless the tokenizer in memory is the one that the folder has, but for its padding."""
    saved = type(processing_class).from_pretrained(name)
    for what in ("chat_template", "eos_token", "bos_token"):
        if getattr(processing_class, what, None) != (theirs := getattr(saved, what, None)):
            raise ConfigError(
                f"processing_class has another {what} than that of {name!r}, {theirs!r:.200}: save it beside the "
                "model, tokenizer.save_pretrained(FOLDER), as each process loads it from there"
            )
    if len(processing_class) != len(saved):
        raise ConfigError(
            f"processing_class has {len(processing_class)} tokens, that of {name!r} {len(saved)}: save it and a model "
            "with as many, and name that folder"
        )


def rows_of(name: str, given: Any, like: Any = None) -> Any:
    """A data set whose rows have a prompt, all of them text or all of them messages.

    Args:
        like: another one, whose prompts are of the same kind.

    Raises:
        ConfigError: it is none.
    """
    if given is None:
        raise ConfigError(f"{name} is missing: give rows with a prompt")
    require_rows(name, given)
    first = None if like is None else next(iter(like))["prompt"]
    for number, row in enumerate(given):
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        first = prompt if first is None else first
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and _are_messages(prompt))):
            raise ConfigError(
                f"{name}, row {number} (from 0) is {row!r:.200}: expected a dictionary with a prompt, text or messages"
            )
        if type(prompt) is not type(first):
            raise ConfigError(
                f"{name}, row {number} (from 0) has the prompt {prompt!r:.200}, others are like {first!r:.200}: "
                "expected text in all of them, or messages in all"
            )
    return given


def _are_messages(prompt: list[Any]) -> bool:
    return bool(prompt) and all(isinstance(each, Mapping) and "role" in each for each in prompt)


def room_for_prompts(model: str, rows: Any, responses: int) -> int:
    """Tokens that the longest prompt may have, as far as its bytes and the model's positions say."""
    positions = ModelFiles.find(model, is_whole=False).config.get("max_position_embeddings")
    prompts = [row["prompt"] for some in rows for row in some]
    longest = max(len((p if isinstance(p, str) else json.dumps(p, ensure_ascii=False)).encode()) for p in prompts)
    longest += ROOM if isinstance(prompts[0], str) else TEMPLATE_ROOM
    return max(1, min(longest, positions - responses)) if isinstance(positions, int) else longest
