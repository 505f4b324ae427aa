"""Where the rows of a micro-batch go in the layers with a gated delta net; `trainer/attention/delta_net.py` reads it.

A prompt, and a padding, begins with an empty state and zeros before its first row; a response begins with its prompt's
final state and last rows. So all prompts run first, then all responses, in chunks of rows.

Shape legend: T fed rows, L places of rows in chunks, E places of rows with the rows before them, P prompts that
responses follow, S sequences of responses, W width of the convolution.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from async_rl.shared.delta_rule import Chunks, rows_of_chunk
from trainer.attention.segments import Segments
from trainer.devices.host_copies import to_device


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """All index tensors are int64.

    Attributes:
        chunk_rows: of every chunk.
        prompts, responses: the two levels of sequences that run together; a level may have none.
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
    prompts: Chunks
    responses: Chunks
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
    chunk_rows = rows_of_chunk(max(lens))
    # In the second stage those of the prompt are kept from the first.
    num_kept = 1 if keeps_prompt else 0 if segments.self_kv_start else 1 + max(prompt_of)
    levels = [[i for i, prompt in enumerate(prompt_of) if (prompt >= 0) is follows] for follows in (False, True)]
    prompts, responses = (Chunks.of([lens[i] for i in level], chunk_rows) for level in levels)
    places = dict(zip(levels[0], prompts.places, strict=True))
    for i, own in zip(levels[1], responses.places, strict=True):
        places[i] = tuple(prompts.num_places + place for place in own)
    followers = [i for i, prompt in enumerate(prompt_of) if prompt >= 0]
    tails = [(i, back) for i in range(num_kept) for back in range(min(reach, lens[i]), 0, -1)]
    indices = {
        "places_T": [place for i in range(len(lens)) for place in places[i]],
        "finals_P": [prompts.order.index(levels[0].index(i)) for i in range(num_kept)],
        "prompt_of_S": [prompt_of[levels[1][i]] for i in responses.order],
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
        prompts=prompts,
        responses=responses,
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
