"""The groups of an iteration as a file of each replica: written by `recording.py`, read by `replay.py`.

A file has the groups in the order in which they finished, without texts and rows of the data set, which training does
not read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from async_rl.token_arrays import TokenIds
from async_rl.types import Batch, Group, Prompt, WeightVersion
from trainer.batching.group_codec import pack_groups, unpack_groups
from trainer.hf.checkpoint import save_tensors

TOKENS, LOGPROBS = "tokens", "logprobs"


@dataclass(frozen=True, slots=True)
class RecordedShare:
    """What one replica had of a batch: `prompt_ids` by index, those included whose groups were not needed."""

    version: WeightVersion
    prompt_ids: dict[int, str]
    groups: list[Group]


def write_share(directory: Path, replica: int, share: Batch, version: WeightVersion, groups: Sequence[Group]) -> None:
    """Writes what a replica had of a batch."""
    headers, tokens, logprobs = pack_groups(groups)
    prompt_ids = {index: prompt.prompt_id for index, prompt in share.prompts.items()}
    about = {"version": version, "prompt_ids": prompt_ids, "groups": headers}
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(
        {TOKENS: tokens, LOGPROBS: logprobs},
        _path(directory, share.iteration, replica),
        {name: json.dumps(value) for name, value in about.items()},
    )


def read_share(directory: Path, iteration: int, replica: int) -> RecordedShare:
    """What a replica had of a batch, as it was written."""
    with safe_open(_path(directory, iteration, replica), framework="pt") as file:
        about = {name: json.loads(text) for name, text in file.metadata().items()}
        groups = unpack_groups(about["groups"], file.get_tensor(TOKENS), file.get_tensor(LOGPROBS))
    return RecordedShare(about["version"], {int(i): name for i, name in about["prompt_ids"].items()}, groups)


def read_batch(directory: Path, iteration: int, num_replicas: int, first_reserve: int | None) -> Batch:
    """The whole batch of an iteration; its prompts have names only."""
    shares = [read_share(directory, iteration, replica) for replica in range(num_replicas)]
    prompts = {i: Prompt(name, TokenIds(), {}) for share in shares for i, name in share.prompt_ids.items()}
    return Batch(iteration, dict(sorted(prompts.items())), first_reserve)


def _path(directory: Path, iteration: int, replica: int) -> Path:
    return directory / f"iteration-{iteration:06}.replica-{replica}.safetensors"
