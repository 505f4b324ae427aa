"""Where the rows of a micro-batch go in the layers with a gated delta net; `trainer/attention/delta_net.py` reads it.

A prompt, and a padding, begins with an empty state and zeros before its first row; a response begins with its prompt's
final state and last rows. So all prompts run first, then all responses. Rows are laid out in chunks: first the first
chunk of every sequence, then the second of each that has one, the longest sequence first, so that a step over all
sequences reads consecutive chunks.

Shape legend: T fed rows, L places of rows in chunks, E places of rows with the rows before them, P prompts that
responses follow, S sequences of responses, W width of the convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from trainer.attention.segments import Segments
from trainer.devices.host_copies import to_device

CHUNK_ROWS = 64
"""At most, a power of two: what a chunk computes at once grows with its rows, what a sequence waits for with chunks."""


@dataclass(frozen=True, slots=True)
class Level:
    """Sequences that run together: `counts` are the numbers of those that have a chunk, step by step."""

    counts: tuple[int, ...]

    def num_places(self, chunk_rows: int) -> int:
        return sum(self.counts) * chunk_rows


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """All index tensors are int64.

    Attributes:
        chunk_rows: of every chunk.
        prompts, responses: the two levels; a level may have no sequence.
        places_T: the place of each row, first those of prompts, then those of responses.
        finals_P: which of the prompts' final states, in the order of their level, are those of the P prompts; empty
            in the second of two stages.
        prompt_of_S: for each response, in the order of its level, the number of its prompt.
        width: W.
        num_wide: E.
        wide_T: the place of each row among E.
        before, before_E: rows of the prompts' last W - 1 rows, [P * (W - 1)], and the places of E that they go to.
        last, last_P: rows of T that are a prompt's last ones, and their places among P * (W - 1).
    """

    chunk_rows: int
    prompts: Level
    responses: Level
    places_T: torch.Tensor
    finals_P: torch.Tensor
    prompt_of_S: torch.Tensor
    width: int
    num_wide: int
    wide_T: torch.Tensor
    before: torch.Tensor
    before_E: torch.Tensor
    last: torch.Tensor
    last_P: torch.Tensor

    @property
    def num_prompts(self) -> int:
        return len(self.finals_P)


def make_delta_plan(segments: Segments, width: int, *, keeps_prompt: bool) -> DeltaPlan:
    """The plan of a micro-batch for a convolution over `width` rows.

    Args:
        keeps_prompt: it is a prompt alone, whose responses follow in the second of two stages.
    """
    lens, device = segments.self_part.q_lens, segments.self_part.device
    prompt_of, starts, reach = _prompts_of(segments), list(accumulate(lens, initial=0)), width - 1
    chunk_rows = min(CHUNK_ROWS, 1 << (max(lens) - 1).bit_length())
    # In the second stage those of the prompt are kept from the first.
    num_kept = 1 if keeps_prompt else 0 if segments.self_kv_start else 1 + max(prompt_of)
    prompts, responses = (
        sorted((i for i, prompt in enumerate(prompt_of) if (prompt >= 0) is is_response), key=lambda i: -lens[i])
        for is_response in (False, True)
    )
    levels = [Level(_counts([lens[i] for i in order], chunk_rows)) for order in (prompts, responses)]
    places: dict[int, list[int]] = {}
    first = 0
    for order, level in zip((prompts, responses), levels, strict=True):
        chunks = list(accumulate(level.counts, initial=0))
        for rank, i in enumerate(order):
            begins = (first + (chunks[step] + rank) * chunk_rows for step in range(-(-lens[i] // chunk_rows)))
            places[i] = [place for begin in begins for place in range(begin, begin + chunk_rows)][: lens[i]]
        first += level.num_places(chunk_rows)
    followers = [i for i, prompt in enumerate(prompt_of) if prompt >= 0]
    tails = [(i, back) for i in range(num_kept) for back in range(min(reach, lens[i]), 0, -1)]
    indices = {
        "places_T": [place for i in range(len(lens)) for place in places[i]],
        "finals_P": [prompts.index(i) for i in range(num_kept)],
        "prompt_of_S": [prompt_of[i] for i in responses],
        "wide_T": [starts[i] + (i + 1) * reach + row for i, length in enumerate(lens) for row in range(length)],
        "before": [prompt_of[i] * reach + row for i in followers for row in range(reach)],
        "before_E": [starts[i] + i * reach + row for i in followers for row in range(reach)],
        "last": [starts[i + 1] - back for i, back in tails],
        "last_P": [(i + 1) * reach - back for i, back in tails],
    }
    flat = to_device(torch.tensor([x for some in indices.values() for x in some], dtype=torch.int64), device)
    parts = flat.split([len(some) for some in indices.values()])
    return DeltaPlan(
        chunk_rows=chunk_rows,
        prompts=levels[0],
        responses=levels[1],
        width=width,
        num_wide=starts[-1] + len(lens) * reach,
        **dict(zip(indices, parts, strict=True)),
    )


def _prompts_of(segments: Segments) -> list[int]:
    """For each segment the number of the prompt that it follows, or -1: prompts that are followed come first."""
    lens = segments.self_part.q_lens
    prompt_of = [-1] * len(lens)
    if segments.cross_part is None:
        return prompt_of
    ends = list(accumulate(segments.cross_part.q_lens, initial=segments.cross_q_start))
    prompt = 0
    for i, start in enumerate(accumulate(lens[:-1], initial=0)):
        if start < ends[0] or start >= ends[-1]:
            continue
        while start >= ends[prompt + 1]:
            prompt += 1
        prompt_of[i] = prompt
    return prompt_of


def _counts(lens: Sequence[int], chunk_rows: int) -> tuple[int, ...]:
    """How many of the sequences, longest first, have a first chunk, a second one, and so on."""
    nums = [-(-length // chunk_rows) for length in lens]
    return tuple(sum(num > step for num in nums) for step in range(max(nums, default=0)))
