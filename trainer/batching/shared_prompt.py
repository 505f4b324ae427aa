"""Lays groups out as micro-batches that hold every prompt once: `p1 p2 ... | r11 ... r1G r21 ...`.

All prompts of a micro-batch come first, then all responses, prompt by prompt in the same order. So the rows that attend
to a prompt are contiguous, as are the prompts, and no kernel has to gather them. The positions of every response start
after its prompt. A response's last token is a label only: nothing follows it, so it is not fed. Observed tokens are fed
only: they are no labels, and the rows before them have no logits.

Shape legend: T fed rows, S key / value rows, P prompt tokens, G responses, N sampled tokens (labels), R rows with
logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from trainer.attention.segments import Segments
from trainer.batching.group_slice import GroupSlice
from trainer.devices.attention_part import Part
from trainer.devices.host_copies import to_device


@dataclass(frozen=True, slots=True)
class Rows:
    """The decoder's input: int64 tokens_T and positions_T, and which rows attend to which."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    segments: Segments


JUDGED_EVERY = 4
"""Of each response every so manieth sampled token, from the first on, tells whether it was drawn as reported."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The tokens whose draws are judged (`proof/draws.py`), chosen by their place in the response alone: what is
    drawn must not decide what is counted.

    `rows` are the J rows of logits that give them, ascending, on the host, and `rows_J` on the device; `index_N` has
    for each label its row's place among them, or -1.
    """

    rows: tuple[int, ...]
    rows_J: torch.Tensor
    index_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """Which rows give the log-prob of which sampled token; all int64.

    Label i is `labels_N[i]`, and the logits of row `logit_rows_R[label_rows_N[i]]` give it: the first token of every
    response uses its prompt's last row. The labels of a response are contiguous, `lengths_G` of them;
    `rollout_lengths_G` are those of its whole rollout, wherever the rollout's other responses are.
    """

    logit_rows_R: torch.Tensor
    label_rows_N: torch.Tensor
    labels_N: torch.Tensor
    lengths_G: torch.Tensor
    rollout_lengths_G: torch.Tensor
    judged: Judged | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some group slices, laid out; labels are in the order of `slices`."""

    slices: tuple[GroupSlice, ...]
    rows: Rows
    labels: Labels


def make_micro_batch(slices: Sequence[GroupSlice], device: torch.device, multiple_of: int = 1) -> MicroBatch:
    """Lays `slices` out as one micro-batch; without slices, one that adds nothing to loss and gradients.

    Args:
        multiple_of: the number of rows is padded to a multiple of it with a separate segment that is never read;
            required by sequence parallelism.
    """
    for part in slices:
        _require_labels(part)
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
            tokens += response.token_ids[:-1]
            positions += range(len(part.prompt), len(part.prompt) + len(response.token_ids) - 1)
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


def make_prompt_rows(prompt: Sequence[int], device: torch.device, multiple_of: int = 1) -> Rows:
    """A prompt alone: the first of the two stages of a slice that is too long for one micro-batch."""
    num_prompt = len(prompt)
    padding = -num_prompt % multiple_of
    lens = [num_prompt, padding] if padding else [num_prompt]
    tokens, positions = [*prompt, *[0] * padding], [*range(num_prompt), *range(padding)]
    tokens_T, positions_T = _integers((tokens, positions), device)
    return Rows(tokens_T, positions_T, Segments(_self_part(lens, device), None))


def make_micro_group(part: GroupSlice, device: torch.device, multiple_of: int = 1) -> MicroBatch:
    """Responses without their prompt's rows: the second stage.

    Key rows are those of the first stage, followed by those of this micro-group. The rows that logits are taken from
    begin with the prompt's last row, which precedes the micro-group's own rows.
    """
    _require_labels(part)
    num_prompt = len(part.prompt)
    tokens = [token for response in part.responses for token in response.token_ids[:-1]]
    positions = [num_prompt + i for fed in part.fed_lens for i in range(fed)]
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
    tokens_T, positions_T, *of_labels, rows_J, index_N = _integers((*rows, *labels), device)
    logit_rows_R, label_rows_N, labels_N, lengths_G, rollout_lengths_G = of_labels
    judged = Judged(tuple(labels[-2]), rows_J, index_N)
    return MicroBatch(
        tuple(slices),
        Rows(tokens_T, positions_T, segments),
        Labels(logit_rows_R, label_rows_N, labels_N, lengths_G, rollout_lengths_G, judged),
    )


def _self_part(lens: Sequence[int], device: torch.device) -> Part:
    return Part(tuple(lens), tuple(lens), True, device)


def _cross_part(attended: Sequence[GroupSlice], prompt_lens: Sequence[int], device: torch.device) -> Part | None:
    if not attended:
        return None
    return Part(tuple(sum(part.fed_lens) for part in attended), tuple(prompt_lens), False, device)


def _labels(
    slices: Sequence[GroupSlice], prompt_ends: dict[int, int], first_rows: dict[int, int]
) -> tuple[list[int], ...]:
    """The fields of the `Labels` of `slices`, whose prompts end before row `prompt_ends`; the last two are of `Judged`.

    Their responses begin at `first_rows`.
    """
    logit_rows: list[int] = [] if slices else [0]
    label_rows: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    rollout_lengths: list[int] = []
    places: list[int] = []
    for part in slices:
        prompt_row: int | None = None
        first_row = first_rows[id(part)]
        for response in part.responses:
            for run in response.sampled_ranges:
                if run and run.start == 0:
                    if prompt_row is None:
                        prompt_row = len(logit_rows)
                        logit_rows.append(prompt_ends[id(part)] - 1)
                    label_rows.append(prompt_row)
                # The row before a token; the first token has none of the response's own.
                rows = range(first_row + max(run.start - 1, 0), first_row + run.stop - 1)
                label_rows += range(len(logit_rows), len(logit_rows) + len(rows))
                logit_rows += rows
                labels += response.token_ids[run.start : run.stop]
            first_row += len(response.token_ids) - 1
            lengths.append(response.num_sampled)
            places += range(response.num_sampled)
        of_rollouts = part.group.rollout_lengths
        rollout_lengths += [of_rollouts[rollout] for rollout in part.rollouts]
    judged = sorted({row for row, place in zip(label_rows, places, strict=True) if place % JUDGED_EVERY == 0})
    order = {row: i for i, row in enumerate(judged)}
    # A row may give a judged token and others: only a prompt's last one does, and all of its tokens are first ones.
    return logit_rows, label_rows, labels, lengths, rollout_lengths, judged, [order.get(row, -1) for row in label_rows]


def _require_labels(part: GroupSlice) -> None:
    """Checks what the layout relies on: whatever breaks it is the mistake of those who made the group."""
    group = part.group
    assert part.prompt, f"a prompt of group {group.index} (prompt {group.prompt.prompt_id!r}) has no tokens"
    assert part.indices, f"a slice of group {group.index} has no responses"
    for i, response in zip(part.indices, part.responses, strict=True):
        name, num_tokens = f"response {i} of group {group.index}", len(response.token_ids)
        assert num_tokens, f"{name} has no tokens"
        if not response.observed:
            continue
        bounds = [-1, *(bound for observed in response.observed for bound in observed), num_tokens]
        assert bounds[1] >= 0 and all(a < b for a, b in pairwise(bounds)), (
            f"{name} has {num_tokens} tokens and observed ranges {response.observed}: expected ascending ranges that "
            "do not touch, and a sampled token after the last one"
        )


def _integers(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Each list as an int64 tensor on the device, all in one copy."""
    whole = to_device(torch.tensor([x for some in lists for x in some], dtype=torch.int64), device)
    return torch.split(whole, [len(some) for some in lists])
