"""Lays groups out as micro-batches that hold every prompt once: `p1 p2 ... | r11 ... r1G r21 ...`.

All prompts of a micro-batch come first, then all responses, group by group in the same order. So the rows that attend
to a prompt are contiguous, as are the prompts, and no kernel has to gather them. The positions of every response start
after its prompt. A response's last token is a label only: nothing follows it, so it is not fed.

Shape legend: T fed rows, S key / value rows, P prompt tokens, G responses, N response tokens (labels), R rows with
logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from async_rl.types import Group
from trainer.attention.segments import Segments
from trainer.devices.attention_part import Part
from trainer.devices.host_copies import to_device


@dataclass(frozen=True, slots=True)
class Rows:
    """The decoder's input: int64 tokens_T and positions_T, and which rows attend to which."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    segments: Segments


@dataclass(frozen=True, slots=True)
class Labels:
    """Which rows give the log-prob of which response token; all int64.

    Label i is `labels_N[i]`, and the logits of row `logit_rows_R[label_rows_N[i]]` give it: the first token of every
    response uses its prompt's last row. The labels of a response are contiguous, `lengths_G` of them.
    """

    logit_rows_R: torch.Tensor
    label_rows_N: torch.Tensor
    labels_N: torch.Tensor
    lengths_G: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Responses [start, stop) of a group, with its prompt: a whole group, or a micro-group of one that is too long."""

    group: Group
    start: int
    stop: int

    @classmethod
    def whole(cls, group: Group) -> "GroupSlice":
        return cls(group, 0, len(group.responses))

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.group.prompt.token_ids

    @property
    def responses(self) -> list[tuple[int, ...]]:
        """Token ids of each response."""
        return [response.token_ids for response in self.group.responses[self.start : self.stop]]

    @property
    def fed_lens(self) -> tuple[int, ...]:
        """Number of rows of each response that has any."""
        return tuple(len(response) - 1 for response in self.responses if len(response) > 1)

    @property
    def num_rows(self) -> int:
        return len(self.prompt) + sum(self.fed_lens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some group slices, laid out; labels are in the order of `slices`."""

    slices: tuple[GroupSlice, ...]
    rows: Rows
    labels: Labels


def num_rows(group: Group) -> int:
    """Rows that a whole group takes in a micro-batch."""
    return GroupSlice.whole(group).num_rows


def split_group(group: Group, max_tokens: int, *, with_prompt: bool) -> list[GroupSlice]:
    """Micro-groups of at most `max_tokens` rows, or of one response where that is longer.

    Args:
        with_prompt: whether each micro-group also has the prompt's rows; False in the second of two stages.
    """
    slices: list[GroupSlice] = []
    num_prompt_rows = len(group.prompt.token_ids) if with_prompt else 0
    start, size = 0, num_prompt_rows
    for i, response in enumerate(group.responses):
        fed = len(response.token_ids) - 1
        if i > start and size + fed > max_tokens:
            slices.append(GroupSlice(group, start, i))
            start, size = i, num_prompt_rows
        size += fed
    return [*slices, GroupSlice(group, start, len(group.responses))]


def make_micro_batch(slices: Sequence[GroupSlice], device: torch.device, multiple_of: int = 1) -> MicroBatch:
    """Lays `slices` out as one micro-batch; without slices, one that adds nothing to loss and gradients.

    Args:
        multiple_of: the number of rows is padded to a multiple of it with a separate segment that is never read;
            required by sequence parallelism.
    """
    for part in slices:
        assert part.prompt, f"prompt {part.group.prompt.prompt_id} has no tokens"
        assert part.responses and all(part.responses), f"group {part.group.index} has a response without tokens"
    # A prompt that no fed row attends to comes after the other prompts, so that the attended ones are contiguous.
    ordered = sorted(slices, key=lambda part: not part.fed_lens)
    tokens = [token for part in ordered for token in part.prompt]
    positions = [i for part in ordered for i in range(len(part.prompt))]
    prompt_ends = dict(zip((id(part) for part in ordered), accumulate(len(p.prompt) for p in ordered), strict=True))
    num_prompt_rows = len(tokens)
    first_rows: dict[int, int] = {}
    for part in ordered:
        first_rows[id(part)] = len(tokens)
        for response in part.responses:
            tokens += response[:-1]
            positions += range(len(part.prompt), len(part.prompt) + len(response) - 1)
    # At least one row, so that every pass runs the same collectives.
    padding = -len(tokens) % multiple_of if tokens else multiple_of
    segment_lens = [len(part.prompt) for part in ordered] + [n for part in ordered for n in part.fed_lens]
    attended = [part for part in ordered if part.fed_lens]
    segments = Segments(
        _self_part([*segment_lens, padding] if padding else segment_lens, device),
        _cross_part(attended, [len(part.prompt) for part in attended], device),
        cross_q_start=num_prompt_rows,
    )
    rows = (tokens + [0] * padding, positions + list(range(padding)))
    return _micro_batch(slices, rows, segments, _labels(slices, prompt_ends, first_rows), device)


def make_prompt_rows(group: Group, device: torch.device, multiple_of: int = 1) -> Rows:
    """The prompt alone: the first of the two stages of a group that is too long for one micro-batch."""
    num_prompt = len(group.prompt.token_ids)
    padding = -num_prompt % multiple_of
    lens = [num_prompt, padding] if padding else [num_prompt]
    tokens, positions = [*group.prompt.token_ids, *[0] * padding], [*range(num_prompt), *range(padding)]
    tokens_T, positions_T = _integers((tokens, positions), device)
    return Rows(tokens_T, positions_T, Segments(_self_part(lens, device), None))


def make_micro_group(part: GroupSlice, device: torch.device, multiple_of: int = 1) -> MicroBatch:
    """Responses without their prompt's rows: the second stage.

    Key rows are those of the first stage, followed by those of this micro-group. Row 0 of those with logits is the
    prompt's last row, which precedes the micro-group's own rows.
    """
    num_prompt = len(part.prompt)
    tokens = [token for response in part.responses for token in response[:-1]]
    positions = [num_prompt + i for response in part.responses for i in range(len(response) - 1)]
    # At least one row, so that every pass runs the same collectives.
    padding = -len(tokens) % multiple_of if tokens else multiple_of
    segments = Segments(
        _self_part([*part.fed_lens, padding] if padding else part.fed_lens, device),
        _cross_part([part] if part.fed_lens else [], [num_prompt], device),
        self_kv_start=num_prompt + -num_prompt % multiple_of,
    )
    rows = (tokens + [0] * padding, positions + list(range(padding)))
    return _micro_batch([part], rows, segments, _labels([part], {id(part): 1}, {id(part): 1}), device)


def _micro_batch(
    slices: Sequence[GroupSlice],
    rows: tuple[list[int], list[int]],
    segments: Segments,
    labels: tuple[list[int], ...],
    device: torch.device,
) -> MicroBatch:
    """A micro-batch of these tokens and positions, and of the fields of `Labels`."""
    tokens_T, positions_T, *of_labels = _integers((*rows, *labels), device)
    return MicroBatch(tuple(slices), Rows(tokens_T, positions_T, segments), Labels(*of_labels))


def _self_part(lens: Sequence[int], device: torch.device) -> Part:
    return Part(tuple(lens), tuple(lens), True, device)


def _cross_part(attended: Sequence[GroupSlice], prompt_lens: Sequence[int], device: torch.device) -> Part | None:
    if not attended:
        return None
    return Part(tuple(sum(part.fed_lens) for part in attended), tuple(prompt_lens), False, device)


def _labels(
    slices: Sequence[GroupSlice], prompt_ends: dict[int, int], first_rows: dict[int, int]
) -> tuple[list[int], ...]:
    """The fields of the `Labels` of `slices`, whose prompts end before row `prompt_ends`.

    Their responses begin at `first_rows`.
    """
    logit_rows: list[int] = [] if slices else [0]
    label_rows: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    for part in slices:
        prompt_row = len(logit_rows)
        logit_rows += [prompt_ends[id(part)] - 1, *_range(first_rows[id(part)], sum(part.fed_lens))]
        next_row = prompt_row + 1
        for response in part.responses:
            label_rows += [prompt_row, *_range(next_row, len(response) - 1)]
            next_row += len(response) - 1
            labels += response
            lengths.append(len(response))
    return logit_rows, label_rows, labels, lengths


def _integers(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Each list as an int64 tensor on the device, all in one copy."""
    whole = to_device(torch.tensor([x for some in lists for x in some], dtype=torch.int64), device)
    return torch.split(whole, [len(some) for some in lists])


def _range(start: int, length: int) -> Iterator[int]:
    return iter(range(start, start + length))
