"""Lays one group out as one micro-batch that holds its prompt once: `p r1 r2 ... rG`.

Positions of every response restart after the prompt. A response's last token is a label only: nothing follows it, so
it is not fed.

Shape legend: T fed tokens, P prompt tokens, G responses, N response tokens (labels), R rows that have a label.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from async_rl.types import Group


@dataclass(frozen=True)
class Segments:
    """Which rows of the micro-batch belong together: `prompt_len` rows, then `response_lens[g]` fed rows of each g.

    A response row attends to all prompt rows and, causally, to its own segment; a prompt row causally to the prompt.
    """

    prompt_len: int
    response_lens: tuple[int, ...]
    device: torch.device

    @cached_property
    def dense_mask_TT(self) -> torch.Tensor:
        """bool [T, T], True where row (query) may attend to column (key); made once, shared by all layers."""
        lens = torch.tensor([self.prompt_len, *self.response_lens], device=self.device)
        segment_T = torch.arange(len(lens), device=self.device).repeat_interleave(lens)
        visible_TT = (segment_T[:, None] == segment_T[None, :]) | (segment_T == 0)[None, :]
        return visible_TT.tril()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One group in the shared-prompt layout.

    `label_rows_N[i]` is the row, counted from the prompt's last one, whose logits give response token `labels_N[i]`;
    the first token of every response takes row 0. All rows from the prompt's last on have labels: R = T - P + 1.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    segments: Segments
    label_rows_N: torch.Tensor
    labels_N: torch.Tensor
    lengths_G: torch.Tensor

    @property
    def first_label_row(self) -> int:
        return self.segments.prompt_len - 1


def make_micro_batch(group: Group, device: torch.device) -> MicroBatch:
    """Packs a group; all index tensors are int64 on `device`, response tokens in the order of `group.responses`."""
    prompt = group.prompt.token_ids
    responses = [response.token_ids for response in group.responses]
    assert prompt, f"prompt {group.prompt.prompt_id} has no tokens"
    assert responses and all(responses), f"group {group.index} has a response without tokens, or no response"
    fed_lens = tuple(len(response) - 1 for response in responses)
    tokens: list[int] = [*prompt]
    positions: list[int] = [*range(len(prompt))]
    label_rows: list[int] = []
    labels: list[int] = []
    next_row = 1  # row 0 is the prompt's last; then come the fed rows of one response after the other
    for response, fed_len in zip(responses, fed_lens, strict=True):
        tokens += response[:-1]
        positions += range(len(prompt), len(prompt) + fed_len)
        label_rows += [0, *range(next_row, next_row + fed_len)]
        labels += response
        next_row += fed_len
    return MicroBatch(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=torch.tensor(positions, device=device),
        segments=Segments(len(prompt), fed_lens, device),
        label_rows_N=torch.tensor(label_rows, device=device),
        labels_N=torch.tensor(labels, device=device),
        lengths_G=torch.tensor([len(response) for response in responses], device=device),
    )
