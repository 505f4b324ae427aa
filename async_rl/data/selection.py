"""Which prompts are trained on and which are held out, over all parts of a mixture: a function of their rows."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from async_rl.data.prompt_table import PromptTable

Indices = Sequence[int]


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices into the table of each part, ascending; `num_repeated` prompts are in neither, for the first one is."""

    trained: list[Indices]
    held_out: list[Indices]
    num_repeated: int


def select(tables: Sequence[PromptTable], *, deduplicate: bool, held_out: float) -> Selection:
    """Divides prompts into those to train on and those held out.

    No text is in both. A prompt is held out by the digest of what its row has, however that is rendered, and without
    its repetitions, which have the same text; of those that are trained on, the first one stays if they are to be
    deduplicated, in the order of parts and rows.

    Args:
        held_out: a share of the texts if below 1, else their number.
    """
    if not deduplicate and not held_out:
        return Selection([range(len(table)) for table in tables], [range(0) for _ in tables], 0)
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
    return Selection(trained, kept_back, num_repeated)


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
