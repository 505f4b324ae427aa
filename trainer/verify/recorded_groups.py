"""The groups of an iteration as a file of each replica: written by `recording.py`, read by `replay.py`.

A file has the groups in the order in which they came to the replica, without texts and rows of the data set, which
training does not read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Batch, Group, Prompt, WeightVersion
from trainer.batching.group_codec import pack_groups, unpack_groups
from trainer.hf.checkpoint import save_tensors

NAMES = ("tokens", "logprobs", "routes")


@dataclass(frozen=True, slots=True)
class RecordedShare:
    """What one replica trained of a batch: `prompt_ids` by index are those of the whole batch."""

    version: WeightVersion
    prompt_ids: dict[int, str]
    groups: list[Group]


def write_share(directory: Path, replica: int, batch: Batch, version: WeightVersion, groups: Sequence[Group]) -> None:
    """Writes what a replica trained of a batch."""
    headers, tensors = pack_groups(groups)
    prompt_ids = {index: prompt.prompt_id for index, prompt in batch.prompts.items()}
    about = {"version": version, "prompt_ids": prompt_ids, "groups": headers}
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(
        dict(zip(NAMES, tensors, strict=True)),
        _path(directory, batch.iteration, replica),
        {name: json.dumps(value) for name, value in about.items()},
    )


def read_share(directory: Path, iteration: int, replica: int) -> RecordedShare:
    """What a replica trained of a batch, as it was written."""
    with safe_open(_path(directory, iteration, replica), framework="pt") as file:
        about = {name: json.loads(text) for name, text in file.metadata().items()}
        tokens, logprobs, routes = map(file.get_tensor, NAMES)
        groups = unpack_groups(about["groups"], (tokens, logprobs, routes))
    return RecordedShare(about["version"], {int(i): name for i, name in about["prompt_ids"].items()}, groups)


def read_batch(directory: Path, iteration: int, first_reserve: int | None) -> Batch:
    """The whole batch of an iteration; its prompts have names only."""
    prompt_ids = read_share(directory, iteration, 0).prompt_ids
    prompts = {i: Prompt(name, TokenIds(), {}) for i, name in prompt_ids.items()}
    return Batch(iteration, dict(sorted(prompts.items())), first_reserve)


def _path(directory: Path, iteration: int, replica: int) -> Path:
    return directory / f"iteration-{iteration:06}.replica-{replica}.safetensors"
