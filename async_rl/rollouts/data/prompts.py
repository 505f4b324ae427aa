"""From sources of rows to `batch(iteration)`: a pure function of the seed and the iteration, so a resumed run skips
nothing.

The epochs of a source form one sequence of rows, each epoch in its own order derived from (seed, epoch); iteration t
takes the places t*B to t*B + B - 1 of that sequence. A batch that crosses an epoch's end takes the rest from the next
epoch. Of a mixture each part has such a sequence, and `order.Schedule` says which part has each place. With a reserve
of R prompts, B + R takes the place of B.
"""

import base64
import logging
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, islice
from operator import sub
from pathlib import Path
from typing import Any

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.method.seeds import mixed_places
from async_rl.method.types import NO_CHECK, AnswerCheck, Batch, Prompt
from async_rl.rollouts.data.cache import PromptCache
from async_rl.rollouts.data.numbered_rows import checked_rows
from async_rl.rollouts.data.order import PartOrder, Schedule, shares_of
from async_rl.rollouts.data.part import SourcePart, parts_of
from async_rl.rollouts.data.prompt_sequence import PromptSequence
from async_rl.rollouts.data.prompt_table import PromptTable
from async_rl.rollouts.data.rendering import CLOCK, Tokenizer, asks_the_clock, conversation_of
from async_rl.rollouts.data.row import Row
from async_rl.rollouts.data.table_files import LoadedPart
from async_rl.rollouts.data.task_rows import REASONING_GYM

Indices = Sequence[int]


@dataclass(frozen=True, slots=True)
class PromptSelection:
    """Indices into the table of each part, ascending; `num_repeated` prompts are in neither, for the first one is."""

    trained: list[Indices]
    held_out: list[Indices]
    num_repeated: int


def select(tables: Sequence[PromptTable], *, deduplicate: bool, held_out: float) -> PromptSelection:
    """Divides prompts into those to train on and those held out.

    No text is in both. A prompt is held out by the digest of what its row has, however that is rendered, and without
    its repetitions, which have the same text; of those that are trained on, the first one stays if they are to be
    deduplicated, in the order of parts and rows.

    Args:
        held_out: a share of the texts if below 1, else their number.
    """
    if not deduplicate and not held_out:
        return PromptSelection([range(len(table)) for table in tables], [range(0) for _ in tables], 0)
    # Imported here: the pre-flight needs none of it.
    numpy = import_module("numpy")
    keys = numpy.concatenate([numpy.frombuffer(t.arrays.keys, numpy.uint64).reshape(-1, 2) for t in tables])
    of_rows, of_texts = keys[:, 0], keys[:, 1]
    is_first = _first_of_each(numpy, of_texts)
    is_held = _held_out(numpy, of_rows, is_first, held_out)
    # Rows that are written otherwise may be rendered as the same text.
    is_held |= numpy.isin(of_texts, of_texts[is_held])
    is_trained = ~is_held & is_first if deduplicate else ~is_held
    num_repeated = int((~is_trained & ~(is_held & is_first)).sum())
    trained: list[Indices] = []
    kept_back: list[Indices] = []
    start = 0
    for table in tables:
        end = start + len(table)
        trained.append(_indices(numpy, is_trained[start:end]))
        kept_back.append(_indices(numpy, (is_held & is_first)[start:end]))
        start = end
    return PromptSelection(trained, kept_back, num_repeated)


def _first_of_each(numpy: Any, keys: Any) -> Any:
    """Whether each prompt is the first one with its key."""
    order = numpy.argsort(keys, kind="stable")
    in_order = keys[order]
    is_first = numpy.ones(len(keys), bool)
    # The sort is stable: of equal keys the first one in order is the first one of all.
    is_first[order[1:]] = in_order[1:] != in_order[:-1]
    return is_first


def _held_out(numpy: Any, digests: Any, is_first: Any, held_out: float) -> Any:
    if held_out < 1:
        return digests < numpy.uint64(int(held_out * 2**64))
    count = min(int(held_out), int(is_first.sum()))
    return digests <= numpy.partition(digests[is_first], count - 1)[count - 1]


def _indices(numpy: Any, chosen: Any) -> Indices:
    indices = array("q")
    indices.frombytes(numpy.flatnonzero(chosen).astype(numpy.int64).tobytes())
    return indices


__all__ = ["REASONING_GYM", "PromptSource", "Subset", "Tokenizer", "conversation_of", "first_rows", "load_prompts"]

logger = logging.getLogger(__name__)


class Subset(PromptSequence):
    """Some prompts of a table, by their indices there."""

    def __init__(self, table: PromptTable, indices: Indices) -> None:
        self.table = table
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def prompt_at(self, index: int) -> Prompt:
        return self.table[self.indices[index]]

    @property
    def difficulties(self) -> Sequence[float]:
        """Of each prompt; empty where no column has them."""
        values = self.table.arrays.difficulties
        return array("d", [values[index] for index in self.indices]) if len(values) else ()


@dataclass(frozen=True, slots=True)
class Outline:
    """What a rank that generates no rollouts needs to know of one part: its prompts by name and difficulty, in JSON."""

    name: str
    numbers: str
    difficulties: str

    @classmethod
    def of(cls, prompts: Subset) -> "Outline":
        numbers = array("q", [prompts.table.arrays.numbers[index] for index in prompts.indices])
        # Most numbers follow the one before, so that their differences need no room.
        steps = array("q", map(sub, numbers, [0, *numbers[:-1]]))
        return cls(prompts.table.name, _packed(steps), _packed(array("d", prompts.difficulties)))

    def prompts(self) -> Subset:
        table = PromptTable.of_numbers(list(accumulate(_unpacked("q", self.numbers))), self.name)
        table.arrays.difficulties = _unpacked("d", self.difficulties)
        return Subset(table, range(len(table)))


class PromptSource:
    """The tokenized prompts of a run, of one source or of several."""

    def __init__(self, parts: Sequence[Subset], config: PromptsSection, seed: int) -> None:
        self._parts = parts
        self._num_drawn = config.num_drawn
        self._first_reserve = config.prompts_per_batch if config.reserve else None
        self._seed = seed
        weights = [part.weight for part in parts_of(config)]
        self._require_enough(weights, config.drawn_keys)
        self._schedule = Schedule(weights)
        by_difficulty = config.curriculum_iterations * self._num_drawn
        self._orders = [
            PartOrder(
                seed,
                part.table.name,
                len(part),
                self._schedule.count(number, by_difficulty),
                part.difficulties if by_difficulty else (),
            )
            for number, part in enumerate(parts)
        ]
        self.held_out: Sequence[Prompt] = ()
        """Prompts that no batch has, for evaluation; of a source that was loaded."""
        self.digests: Mapping[str, str] = {}
        """Of ranges of its rows, by their first and last one; of a source that was loaded."""
        self._longest: Prompt | None = None

    @classmethod
    def load(
        cls,
        config: PromptsSection,
        tokenizer: Tokenizer,
        seed: int,
        cache_dir: Path | None = None,
        answers: AnswerCheck = NO_CHECK,
    ) -> "PromptSource":
        """Reads, renders and tokenizes the sources; reports and leaves out prompts that cannot be used.

        Args:
            cache_dir: where the tokenized prompts are kept, or have been kept by an earlier start; by default in
                temporary files.
            answers: leaves out rows whose answers the reward cannot read.

        Raises:
            ConfigError: a source cannot be read or is malformed, or fewer prompts than one batch are left.
            WriteFailed: there is no room for the tokenized prompts.
        """
        if config.chat_template and asks_the_clock(tokenizer, config.template_arguments):
            logger.warning(
                "the tokenizer's chat template asks for the date (%s): on another day it renders other prompts, which "
                "a run that resumes without its tokenized prompts takes for other data; if the template reads a "
                "variable instead, name it in prompts.chat_template",
                CLOCK,
            )
        cache = PromptCache(cache_dir)
        loaded = [cache.load(part, tokenizer, seed, answers=answers) for part in parts_of(config)]
        cache.remove_others()
        tables = [each.table for each in loaded]
        selection = select(tables, deduplicate=config.deduplicate, held_out=config.held_out)
        source = cls([Subset(*each) for each in zip(tables, selection.trained, strict=True)], config, seed)
        source.held_out = _Joined([Subset(*each) for each in zip(tables, selection.held_out, strict=True)])
        source.digests = {name: digest for each in loaded for name, digest in each.digests.items()}
        source._longest = _longest(loaded)
        logger.info(
            "%d prompts, %d held out; %d are repetitions and left out",
            len(source),
            len(source.held_out),
            selection.num_repeated,
        )
        return source

    @classmethod
    def by_outlines(cls, outlines: Sequence[Mapping[str, str]], config: PromptsSection, seed: int) -> "PromptSource":
        """The same batches, of prompts without tokens and rows: enough for a rank that generates no rollouts."""
        return cls([Outline(**each).prompts() for each in outlines], config, seed)

    @property
    def outlines(self) -> list[Outline]:
        """What `by_outlines` takes on another rank, as dicts."""
        return [Outline.of(part) for part in self._parts]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def longest(self) -> Prompt:
        """The prompt with the most tokens."""
        assert self._longest is not None, "a source by name has no tokens"
        return self._longest

    def batch(self, iteration: int) -> Batch:
        """The prompts of one iteration (counted from 0), at indices 0 to B - 1; those of a reserve follow."""
        first = iteration * self._num_drawn
        places: Sequence[int] = range(self._num_drawn)
        if len(self._parts) > 1:
            # By index a batch is divided among replicas and steps: each should get something of every part.
            places = mixed_places(self._seed, iteration, self._num_drawn)
        prompts = {i: self._at(first + place) for i, place in enumerate(places)}
        return Batch(iteration, prompts, self._first_reserve)

    def find(self, prompt_id: str) -> Prompt:
        """The prompt of that name.

        Raises:
            ConfigError: no batch has such a prompt.
        """
        name, _, number = prompt_id.rpartition("/")
        for part in self._parts:
            if part.table.name == name and (index := part.table.index_of(number)) is not None:
                return part.table[index]
        raise ConfigError(f"the prompts have no {prompt_id!r}: trainer and producer read other data")

    def _at(self, place: int) -> Prompt:
        part, place_in_part = self._schedule.part(place)
        return self._parts[part][self._orders[part].index_at(place_in_part)]

    def _require_enough(self, weights: Sequence[float], keys: str) -> None:
        if len(self) < self._num_drawn:
            raise ConfigError(f"{len(self)} prompts are left for {keys}: give more rows or a smaller batch")
        for part, weight, share in zip(self._parts, weights, shares_of(weights, self._num_drawn), strict=True):
            if len(part) < share:
                raise ConfigError(
                    f"{len(part)} prompts of prompts.mixture {part.table.name!r} are left, but its weight {weight} "
                    f"gives it {share} of {keys}: give more rows or a smaller weight"
                )


def load_prompts(
    config: PromptsSection,
    tokenizer: Tokenizer,
    seed: int,
    max_rows: int | None = None,
    answers: AnswerCheck = NO_CHECK,
) -> PromptTable:
    """The first `max_rows` rows of the only source, or all, rendered and tokenized.

    Raises:
        ConfigError: the source cannot be read or is malformed, or every prompt is longer than `max_prompt_tokens`.
        WriteFailed: there is no room for temporary files.
    """
    (part,) = parts_of(config)
    return PromptCache(None).load(part, tokenizer, seed, max_rows, answers).table


def first_rows(part: SourcePart, max_rows: int) -> list[Row]:
    """The first `max_rows` rows of a source, or all, checked as far as possible without a tokenizer.

    Raises:
        ConfigError: the source cannot be read, or one of these rows has no prompt that can be rendered.
    """
    return [each.row for each in islice(checked_rows(part, part.rows(seed=0), max_rows), max_rows)]


class _Joined(PromptSequence):
    """Several sequences of prompts, one after the other."""

    def __init__(self, parts: Sequence[Subset]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def prompt_at(self, index: int) -> Prompt:
        number = next(number for number, end in enumerate(self._ends) if index < end)
        return self._parts[number][index - self._ends[number] + len(self._parts[number])]


def _longest(loaded: Sequence[LoadedPart]) -> Prompt | None:
    with_prompts = [each for each in loaded if len(each.table)]
    if not with_prompts:
        return None
    most = max(with_prompts, key=lambda each: each.table.num_tokens(each.longest))
    return most.table[most.longest]


def _packed(values: "array[Any]") -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def _unpacked(kind: Any, text: str) -> "array[Any]":
    values: array[Any] = array(kind)
    values.frombytes(zlib.decompress(base64.b64decode(text)))
    return values
