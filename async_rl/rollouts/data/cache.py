"""Where the files of prompt tables are: in the directory of a run, for it to resume, or nowhere that has a name.

CACHE/KEY/       a table; KEY digests its source's contents, its settings and the tokenizer
CACHE/.lock      held while one is written: runs that share a cache write it once
CACHE/.KEY.partial   one that is being written, or was when its writer died
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.method.types import NO_CHECK, AnswerCheck
from async_rl.rollouts.data.part import SourcePart
from async_rl.rollouts.data.rendering import Tokenizer
from async_rl.rollouts.data.row import Rows
from async_rl.rollouts.data.table_files import LoadedPart, is_whole, open_table, write_table
from async_rl.shared.files import named_write_errors, replace_directory

logger = logging.getLogger(__name__)

FORMAT = 3
"""Of the files and of what is in them; counted up when either changes."""

IRRELEVANT = (
    "name",
    "source",
    "weight",
    "stop",
    "stop_token_ids",
    "max_response_tokens",
    "reward",
    "task_options",
)
"""Fields of a part that do not change its table."""


class PromptCache:
    """Keeps the tables of a run in `directory`; without one they are in temporary files, which end with the process."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._used: set[str] = set()

    def load(
        self,
        part: SourcePart,
        tokenizer: Tokenizer,
        seed: int,
        max_rows: int | None = None,
        answers: AnswerCheck = NO_CHECK,
    ) -> LoadedPart:
        """The prompts of the first `max_rows` rows of a part, or of all.

        Raises:
            ConfigError: the source cannot be read or is malformed, or no prompt is left.
            WriteFailed: the files cannot be written, as on a full disk.
        """
        rows = part.rows(seed)
        key = None if self._directory is None or max_rows is not None else _key(part, rows, tokenizer, answers)
        if self._directory is None or key is None:
            with tempfile.TemporaryDirectory(prefix="async-rl-prompts-") as unnamed:
                write_table(part, rows, tokenizer, Path(unnamed), max_rows, answers)
                return open_table(part, rows, Path(unnamed))
        self._used.add(key)
        with _lock(self._directory):
            final = self._directory / key
            if not is_whole(final):
                if final.exists():
                    logger.warning("%s is damaged: prompts of %r are tokenized again", final, part.source)
                self._write(part, rows, tokenizer, final, answers)
            else:
                logger.info("prompts of %r are taken from %s", part.source, final)
            return open_table(part, rows, final)

    def remove_others(self) -> None:
        """Removes the tables that were not loaded, of other settings or contents, and parts of tables."""
        if self._directory is None or not self._used:
            return
        with _lock(self._directory):
            for path in _tables(self._directory, self._used):
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, part: SourcePart, rows: Rows, tokenizer: Tokenizer, final: Path, answers: AnswerCheck) -> None:
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with named_write_errors(partial):
            partial.mkdir()
        try:
            write_table(part, rows, tokenizer, partial, answers=answers)
            replace_directory(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _tables(directory: Path, used: Collection[str]) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir() and path.name not in used]


def _key(part: SourcePart, rows: Rows, tokenizer: Tokenizer, answers: AnswerCheck) -> str | None:
    """Names a table; None if rows or tokenizer cannot be identified."""
    try:
        contents = rows.identity()
    except OSError as error:
        raise ConfigError(
            f"prompts.source {part.source!r} cannot be read: {error.strerror or error}; check the path"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if contents is None or backend is None:
        return None
    settings = {name: value for name, value in asdict(part).items() if name not in IRRELEVANT}
    digest = hashlib.sha256()
    for text in (str(FORMAT), contents, json.dumps(settings, sort_keys=True), backend.to_str(), answers.identity):
        digest.update(hashlib.sha256(text.encode()).digest())
    # Templates name special tokens, which the backend does not have under these names.
    of_template = [tokenizer.chat_template, getattr(tokenizer, "special_tokens_map", None)]
    digest.update(json.dumps(of_template, default=repr).encode())
    return digest.hexdigest()[:32]


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    with named_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
