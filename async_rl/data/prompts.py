"""From a dataset to `batch(iteration)`: a pure function of the seed and the iteration, so a resumed run skips nothing.

The epochs form one sequence of rows, each epoch in its own order derived from (seed, epoch); iteration t takes the
indices t*B to t*B + B - 1 of that sequence. A batch that crosses an epoch's end takes the rest from the next epoch.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from async_rl.config.sections import PromptsSection
from async_rl.data.prompt_table import PromptTable
from async_rl.errors import ConfigError
from async_rl.seeds import prompt_order
from async_rl.types import Batch, Prompt

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Message(TypedDict):
    """The required field of every chat message; the chat template handles any others."""

    role: str


CONVERSATION = TypeAdapter(Annotated[list[Message], Field(min_length=1)])

REASONING_GYM = "reasoning-gym:"
TOKENIZE_AT_ONCE = 1024
MAX_NAMED_IDS = 10


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and responses need."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool
    ) -> list[str]: ...

    def batch_decode(self, sequences: list[Any], *, skip_special_tokens: bool) -> list[str]: ...


class PromptSource:
    """The tokenized prompts of a run. `prompt_id` is the row's number in the source, counted from 0."""

    def __init__(self, prompts: PromptTable, prompts_per_batch: int, seed: int) -> None:
        if len(prompts) < prompts_per_batch:
            raise ConfigError(
                f"{len(prompts)} prompts are left for prompts.prompts_per_batch = {prompts_per_batch}: "
                "give more rows or a smaller batch"
            )
        self._prompts = prompts
        self._batch_size = prompts_per_batch
        # An epoch's order is needed for many consecutive batches, and two of them if a batch crosses the boundary.
        self._order = lru_cache(maxsize=2)(lambda epoch: prompt_order(seed, epoch, len(prompts)))

    @classmethod
    def load(cls, config: PromptsSection, tokenizer: Tokenizer, seed: int) -> "PromptSource":
        """Reads, renders and tokenizes the whole source; reports and leaves out prompts over `max_prompt_tokens`.

        Raises:
            ConfigError: the source cannot be read or is malformed, or fewer prompts than one batch are left.
        """
        return cls(load_prompts(config, tokenizer, seed), config.prompts_per_batch, seed)

    @classmethod
    def by_name(cls, numbers: Sequence[int], config: PromptsSection, seed: int) -> "PromptSource":
        """The same batches, of prompts without tokens and rows: enough for a rank that generates no rollouts."""
        return cls(PromptTable.of_numbers(numbers), config.prompts_per_batch, seed)

    @property
    def table(self) -> PromptTable:
        return self._prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest(self) -> Prompt:
        """The prompt with the most tokens."""
        return max(self._prompts, key=lambda prompt: len(prompt.token_ids))

    def batch(self, iteration: int) -> Batch:
        """The prompts of one iteration (counted from 0), at indices 0 to B - 1."""
        first = iteration * self._batch_size
        return Batch(iteration, {i: self._at(first + i) for i in range(self._batch_size)})

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[offset]]


def load_prompts(config: PromptsSection, tokenizer: Tokenizer, seed: int, max_rows: int | None = None) -> PromptTable:
    """The first `max_rows` rows of the source, or all, rendered and tokenized.

    Raises:
        ConfigError: the source cannot be read or is malformed, or every prompt is longer than `max_prompt_tokens`.
    """
    rows = _load_rows(config, seed, max_rows)
    texts = _render(rows, config, tokenizer)
    # A chat template adds the special tokens itself.
    tokenized = _tokenize(texts, tokenizer, add_special_tokens=not config.chat_template)
    return _without_unusable(zip(tokenized, rows, strict=True), config)


def first_rows(config: PromptsSection, max_rows: int) -> list[Row]:
    """The first `max_rows` rows of the source, or all, checked as far as possible without a tokenizer.

    Raises:
        ConfigError: the source cannot be read, or one of these rows has no prompt that can be rendered.
    """
    rows = _load_rows(config, seed=0, max_rows=max_rows)
    _require_renderable(rows, config)
    return rows


def conversation_of(row: Mapping[str, Any], config: PromptsSection) -> list[dict[str, Any]] | None:
    """The chat messages of a row's prompt, or None where prompts are plain text."""
    return _conversation(row[_column(config)], config) if config.chat_template else None


def _load_rows(config: PromptsSection, seed: int, max_rows: int | None) -> list[Row]:
    if config.source.startswith(REASONING_GYM):
        return _reasoning_gym_rows(config, seed, max_rows)
    return _file_rows(config, max_rows)


def _file_rows(config: PromptsSection, max_rows: int | None) -> list[Row]:
    path = Path(config.source)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"prompts.source is {config.source!r}: expected a .jsonl or .parquet file, or {REASONING_GYM}TASK"
        )
    try:
        rows = list(islice(_jsonl_rows(path), max_rows)) if path.suffix == ".jsonl" else _parquet_rows(path, max_rows)
    except OSError as error:
        raise ConfigError(
            f"prompts.source {config.source!r} cannot be read: {error.strerror}; check the path"
        ) from error
    if not rows:
        raise ConfigError(f"prompts.source {config.source!r} has no rows")
    for number, row in enumerate(rows):
        if row.get(config.column) is None:
            raise ConfigError(
                f"prompts.source {config.source!r}, row {number}: no value in column {config.column!r} "
                f"(it has {sorted(row)}): set prompts.column"
            )
    return rows


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{path}, line {number} is not UTF-8 text: {error}; save the file as UTF-8"
                ) from error
            except ValueError as error:
                raise ConfigError(
                    f"{path}, line {number} is not JSON: {error}; each line must be one object"
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} is {type(row).__name__}: each line must be one JSON object")
            yield row


def _parquet_rows(path: Path, max_rows: int | None) -> list[Row]:
    # Imported here: programs that show their help, or read JSON lines, need not wait for it.
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        with path.open("rb") as file:
            if max_rows is None:
                rows: list[Row] = parquet.read_table(file).to_pylist()
            else:
                batches = parquet.ParquetFile(file).iter_batches(batch_size=max_rows)
                rows = list(islice((row for batch in batches for row in batch.to_pylist()), max_rows))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error
    return rows


def _reasoning_gym_rows(config: PromptsSection, seed: int, max_rows: int | None) -> list[Row]:
    """Rows of a task: question, answer, metadata, and the reward's inputs for scoring them (task, task_options)."""
    task = config.source.removeprefix(REASONING_GYM)
    options = {"seed": seed, "size": config.num_rows, **config.task_options}
    try:
        dataset = import_module("reasoning_gym").create_dataset(task, **options)
        return [
            {
                "question": entry["question"],
                "answer": entry["answer"],
                "metadata": entry["metadata"],
                "task": task,
                "task_options": options,
            }
            for entry in islice(dataset, max_rows)
        ]
    except ImportError as error:
        raise ConfigError(f"prompts.source {config.source!r} needs reasoning-gym: install async-rl[tasks]") from error
    # The task's own validation uses assertions.
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"prompts.source {config.source!r} with prompts.task_options {config.task_options} does not work: {error}"
        ) from error


def _render(rows: list[Row], config: PromptsSection, tokenizer: Tokenizer) -> list[str]:
    _require_renderable(rows, config)
    column = _column(config)
    values = [row[column] for row in rows]
    if not config.chat_template:
        return values
    if tokenizer.chat_template is None:
        raise ConfigError("the tokenizer has no chat template: set prompts.chat_template = false")
    conversations = [_conversation(value, config) for value in values]
    return tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)


def _column(config: PromptsSection) -> str:
    return "question" if config.source.startswith(REASONING_GYM) else config.column


def _require_renderable(rows: list[Row], config: PromptsSection) -> None:
    """Checks that every row's prompt has the configured form: text or, with a chat template, also messages.

    Raises:
        ConfigError: one has not; names its row.
    """
    if config.system_prompt is not None and not config.chat_template:
        raise ConfigError("prompts.system_prompt is set, but prompts.chat_template = false leaves no place for it")
    column = _column(config)
    for number, row in enumerate(rows):
        value = row[column]
        if isinstance(value, str):
            continue
        if not config.chat_template:
            raise ConfigError(
                f"row {number}: column {column!r} is {type(value).__name__}, expected text; "
                "chat messages need prompts.chat_template = true"
            )
        try:
            CONVERSATION.validate_python(value, strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = "".join(f"[{part!r}]" for part in fault["loc"])
            raise ConfigError(
                f"row {number}: column {column!r} is {value!r:.80}, expected text or a list of chat messages with a "
                f"role: correct {column}{where} ({fault['msg']}), or set prompts.column"
            ) from error


def _conversation(value: Any, config: PromptsSection) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []
    if isinstance(value, str):
        return [*system, {"role": "user", "content": value}]
    return value if value[0]["role"] == "system" else [*system, *value]


def _tokenize(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> Iterator[list[int]]:
    for start in range(0, len(texts), TOKENIZE_AT_ONCE):
        chunk = texts[start : start + TOKENIZE_AT_ONCE]
        yield from tokenizer(chunk, add_special_tokens=add_special_tokens)["input_ids"]


def _without_unusable(rows: Iterable[tuple[list[int], Row]], config: PromptsSection) -> PromptTable:
    limit = config.max_prompt_tokens
    kept = PromptTable()
    empty: list[str] = []
    longer: dict[str, int] = {}
    for number, (token_ids, row) in enumerate(rows):
        if not token_ids:
            empty.append(str(number))
        elif len(token_ids) > limit:
            longer[str(number)] = len(token_ids)
        else:
            kept.append(number, token_ids, row)
    num_rows = len(kept) + len(empty) + len(longer)
    if empty:
        logger.warning("%d of %d prompts are empty and left out: rows %s", len(empty), num_rows, _named(empty))
    if longer:
        report = f"{len(longer)} of {num_rows} prompts have more than prompts.max_prompt_tokens = {limit} tokens"
        report += f" (longest: {max(longer.values())}): rows {_named(list(longer))}"
        if not kept:
            raise ConfigError(f"{report}; none is left: raise the limit or shorten the prompts")
        logger.warning("%s; they are left out", report)
    return kept


def _named(ids: list[str]) -> str:
    more = len(ids) - MAX_NAMED_IDS
    return ", ".join(ids[:MAX_NAMED_IDS]) + (f" and {more} more" if more > 0 else "")
