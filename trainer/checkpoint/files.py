"""Checkpoints as directories: one gets its final name only when it is complete; its manifest shows later damage.

    RUN/checkpoints/iteration-000050/       manifest.json, .metadata, __0_0.distcp, ...
    RUN/checkpoints/.iteration-000100.term-3.partial/       being written, or left behind by a run that was killed

The number is that of the next iteration to train, the term that of the lease of the trainer that writes.
`trainer/checkpoint/checkpoint.py` writes and reads them; `trainer/export.py` reads them.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from async_rl.errors import ConfigError
from async_rl.shared.checkpoint_names import MANIFEST, number_in, whole_checkpoints
from async_rl.shared.files import remove_directory, replace_directory, write_file

FORMAT = 1
"""Format of the manifest and of tensor names; a checkpoint of another format is refused."""

_CHUNK_BYTES = 16 * 2**20


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """The directory of the checkpoint from which `iteration` is trained next."""
    return directory / f"iteration-{iteration:06}"


def partial_path(directory: Path, iteration: int, term: int = 0) -> Path:
    """Where that checkpoint is until it is complete; never that of a trainer with another term."""
    return directory / f".iteration-{iteration:06}.term-{term}.partial"


def remove_partial(directory: Path) -> None:
    """Removes the partial checkpoints of killed runs."""
    for path in directory.glob(".iteration-*"):
        shutil.rmtree(path)


def keep_newest(directory: Path, num_kept: int) -> None:
    """Removes the older checkpoints."""
    for path in list(whole_checkpoints(directory))[:-num_kept]:
        remove_directory(path)


def file_sums(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """name -> its size in bytes and its xxh3 checksum (64 bits, hexadecimal)."""
    return {name: {"bytes": (directory / name).stat().st_size, "xxh3": _file_sum(directory / name)} for name in names}


def seal(partial: Path, final: Path, content: dict[str, Any]) -> None:
    """Writes the manifest and gives the directory its final name; after a crash it has either the old or the new name.

    Args:
        content: the manifest's content, including `files` (see `file_sums`). The files are already on the disk.
    """
    content = {"format": FORMAT, **content}
    write_json(partial / MANIFEST, {"content": content, "xxh3": _json_sum(content)})
    # It may exist already, if this run was resumed from an older checkpoint.
    replace_directory(partial, final)


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's manifest.

    Raises:
        ConfigError: there is no manifest, it was altered, or another version of async-rl wrote it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        content, expected = manifest["content"], manifest["xxh3"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, MANIFEST, f"cannot be read ({type(error).__name__}: {error})") from error
    if _json_sum(content) != expected:
        raise damaged(path, MANIFEST, "was altered: its checksum does not match")
    if content["format"] != FORMAT:
        raise ConfigError(
            f"checkpoint {str(path)!r} has format {content['format']}, expected {FORMAT}: "
            "use the version of async-rl that wrote it"
        )
    return dict(content)


def find_damage(path: Path, files: dict[str, dict[str, Any]]) -> ConfigError | None:
    """The error of the first of `files` that is missing or altered; reads them all."""
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return damaged(path, name, "is missing")
        if file.stat().st_size != expected["bytes"]:
            return damaged(path, name, f"has {file.stat().st_size} bytes, expected {expected['bytes']}")
        if _file_sum(file) != expected["xxh3"]:
            return damaged(path, name, f"was altered: its checksum is not {expected['xxh3']}")
    return None


def damaged(path: Path, name: str, what: str) -> ConfigError:
    """The error for a checkpoint that is damaged; its remedy names the previous checkpoint."""
    checkpoints = whole_checkpoints(path.parent)
    older = [other for other, number in checkpoints.items() if number < (number_in(path.name) or 0)]
    then = f"the one before it is {older[-1].name}" if older else "there is none before it, so the run starts anew"
    return ConfigError(f"checkpoint {str(path)!r} is damaged: {name} {what}. Remove the directory; {then}")


def write_json(path: Path, content: Any) -> None:
    """Writes a file and waits until it is on the disk."""
    write_file(path, json.dumps(content, indent=1))


def _file_sum(path: Path) -> str:
    checksum = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest()


def _json_sum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
