"""Lays groups out as micro-batches that hold every prompt once: `p1 p2 ... | r11 ... r1G r21 ...`.

All prompts of a micro-batch come first, then all responses, prompt by prompt in the same order. So the rows that attend
to a prompt are contiguous, as are the prompts, and no kernel has to gather them. The positions of every response start
after its prompt. A response's last token is a label only: nothing follows it, so it is not fed. Observed tokens are fed
only: they are no labels, and the rows before them have no logits.

Context-parallel ranks lay out the same micro-batch, and have a run of its rows each, with the labels that these give.

Shape legend: T fed rows of this rank, S key / value rows, P prompt tokens, G responses, N sampled tokens (labels) of
this rank, R its rows with logits, W layers times chosen experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from async_rl.method.token_arrays import ExpertIds
from trainer.attention.segments import Segments
from trainer.batching.group_slice import GroupSlice
from trainer.devices.attention_part import Part
from trainer.devices.host_copies import to_device


@dataclass(frozen=True, slots=True)
class RowShare:
    """Which rows a context-parallel rank has: those of number `rank` of `ways` runs of equal length.

    Rows are padded to a multiple of `multiple_of`, which is one of `ways`, with a separate segment that is never read;
    tensor-parallel ranks divide a run once more.
    """

    multiple_of: int = 1
    rank: int = 0
    ways: int = 1

    def padding(self, num_rows: int) -> int:
        """Rows to add; at least one row in all, so that every pass runs the same collectives."""
        return -num_rows % self.multiple_of if num_rows else self.multiple_of

    def of(self, num_rows: int) -> range:
        """The numbers of this rank's rows, of `num_rows` with the padding."""
        size = num_rows // self.ways
        return range(self.rank * size, (self.rank + 1) * size)


WHOLE = RowShare()


@dataclass(frozen=True, slots=True)
class Rows:
    """The decoder's input: int64 tokens_T and positions_T, and which rows, of all ranks, attend to which.

    `routes_TW`, int16, are the experts that the sampler chose for each row, of all layers one after the other
    (arXiv 2510.11370), where it has reported them.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    segments: Segments
    routes_TW: torch.Tensor | None = None


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
    response uses its prompt's last row. The labels of a response are contiguous, `lengths_G` of them, of all ranks;
    `rollout_lengths_G` are those of its whole rollout, wherever the rollout's other responses are. Where ranks share
    rows, label i has place `places_N[i]` among the `num_labels` of the micro-batch.
    """

    logit_rows_R: torch.Tensor
    label_rows_N: torch.Tensor
    labels_N: torch.Tensor
    lengths_G: torch.Tensor
    rollout_lengths_G: torch.Tensor
    judged: Judged | None = None
    places_N: torch.Tensor | None = None
    num_labels: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some group slices, laid out; labels are in the order of `slices`."""

    slices: tuple[GroupSlice, ...]
    rows: Rows
    labels: Labels


def make_micro_batch(slices: Sequence[GroupSlice], device: torch.device, share: RowShare = WHOLE) -> MicroBatch:
    """Lays `slices` out as one micro-batch; without slices, one that adds nothing to loss and gradients."""
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
    padding = share.padding(len(tokens))
    segment_lens = [len(part.prompt) for part in ordered] + [n for part in ordered for n in part.fed_lens]
    attended = [part for part in ordered if part.fed_lens]
    segments = Segments(
        _self_part([*segment_lens, padding] if padding else segment_lens, device),
        _cross_part(attended, [len(part.prompt) for part in attended], device),
        cross_q_start=num_prompt_rows,
    )
    own = share.of(segments.num_rows)
    labels = _own_labels(_labels(slices, prompt_ends, first_rows), own, own.start)
    routes = [*map(_prompt_routes, ordered), *(response.routes for part in ordered for response in part.responses)]
    routes_TW = _routes(routes, len(tokens), padding, own, device)
    rows = _own_rows(tokens, positions, padding, own)
    return _micro_batch(slices, rows, segments, labels, routes_TW, device, share)


def make_prompt_rows(whole: GroupSlice, device: torch.device, share: RowShare = WHOLE) -> Rows:
    """A prompt alone: the first of the two stages of a slice that is too long for one micro-batch."""
    prompt = whole.prompt
    num_prompt, padding = len(prompt), share.padding(len(prompt))
    lens = [num_prompt, padding] if padding else [num_prompt]
    own = share.of(num_prompt + padding)
    tokens_T, positions_T = _integers(_own_rows([*prompt], [*range(num_prompt)], padding, own), device)
    routes_TW = _routes([_prompt_routes(whole)], num_prompt, padding, own, device)
    return Rows(tokens_T, positions_T, Segments(_self_part(lens, device), None), routes_TW)


def last_prompt_row(num_prompt: int, share: RowShare = WHOLE) -> tuple[int, bool]:
    """(This rank's row to give on from `make_prompt_rows`; whether it is the prompt's last row, or another rank has
    that)."""
    own, last = share.of(num_prompt + share.padding(num_prompt)), num_prompt - 1
    return min(max(last, own.start), own.stop - 1) - own.start, last in own


def make_micro_group(part: GroupSlice, device: torch.device, share: RowShare = WHOLE) -> MicroBatch:
    """Responses without their prompt's rows: the second stage.

    Key rows are those of the first stage, followed by those of this micro-group. The rows that logits are taken from
    begin with the one of `last_prompt_row`, which precedes the micro-group's own rows.
    """
    _require_labels(part)
    num_prompt = len(part.prompt)
    tokens = [token for response in part.responses for token in response.token_ids[:-1]]
    positions = [num_prompt + i for fed in part.fed_lens for i in range(fed)]
    padding = share.padding(len(tokens))
    segments = Segments(
        _self_part([*part.fed_lens, padding] if padding else part.fed_lens, device),
        _cross_part([part] if part.fed_lens else [], [num_prompt], device),
        self_kv_start=num_prompt + share.padding(num_prompt),
    )
    own = share.of(segments.num_rows)
    _, has_prompt = last_prompt_row(num_prompt, share)
    numbered = range(own.start + 1, own.stop + 1)
    labels = _own_labels(_labels([part], {id(part): 1}, {id(part): 1}), numbered, own.start, has_first=has_prompt)
    routes_TW = _routes([response.routes for response in part.responses], len(tokens), padding, own, device)
    rows = _own_rows(tokens, positions, padding, own)
    return _micro_batch([part], rows, segments, labels, routes_TW, device, share)


@dataclass(frozen=True, slots=True)
class _LabelLists:
    """The fields of `Labels` on the host; `in_response` has the place of each label in its response."""

    logit_rows: list[int]
    label_rows: list[int]
    labels: list[int]
    lengths: list[int]
    rollout_lengths: list[int]
    in_response: list[int]
    places: list[int]

    def judged(self) -> tuple[list[int], list[int]]:
        """(The judged rows; for each label its row's number among them, or -1.)

        A row may give a judged token and others: only a prompt's last one does, and all of its tokens are first ones.
        """
        pairs = zip(self.label_rows, self.in_response, strict=True)
        rows = sorted({row for row, place in pairs if place % JUDGED_EVERY == 0})
        order = {row: i for i, row in enumerate(rows)}
        return rows, [order.get(row, -1) for row in self.label_rows]


def _own_rows(tokens: list[int], positions: list[int], padding: int, own: range) -> tuple[list[int], list[int]]:
    """Tokens and positions of this rank's rows."""
    part = slice(own.start, own.stop)
    return (tokens + [0] * padding)[part], (positions + list(range(padding)))[part]


def _own_labels(whole: _LabelLists, own: range, shift: int, *, has_first: bool = False) -> _LabelLists:
    """Those of the labels whose logits come from the rows `own`, which this rank numbers from `shift` on.

    Args:
        has_first: whether row 0 is this rank's, too, and has that number there.
    """
    rows = [0 if has_first and row == 0 else row - shift if row in own else None for row in whole.logit_rows]
    numbers: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row is not None:
            numbers[i] = len(numbers)
    places = [place for place, i in enumerate(whole.label_rows) if i in numbers]
    return _LabelLists(
        # At least one row, so that every pass runs the same collectives.
        [row for row in rows if row is not None] or [0],
        [numbers[whole.label_rows[place]] for place in places],
        [whole.labels[place] for place in places],
        whole.lengths,
        whole.rollout_lengths,
        [whole.in_response[place] for place in places],
        places,
    )


def _prompt_routes(part: GroupSlice) -> ExpertIds | None:
    """The group's first response that follows the prompt has them: they are computed once."""
    responses = part.group.responses
    if responses[0].routes is None:
        return None
    return responses[part.group.responses_by_prompt[part.prompt][0]].prompt_routes


def _routes(
    parts: Sequence[ExpertIds | None], num_rows: int, padding: int, own: range, device: torch.device
) -> torch.Tensor | None:
    """The routes of this rank's rows `own` among so many, which padding follows: it has those of the first row. None
    without any."""
    known = [part for part in parts if part is not None]
    assert len(known) in (0, len(parts)), f"{len(known)} of {len(parts)} prompts and responses have routes"
    flat = np.frombuffer(ExpertIds.joined(known).buffer, np.int16)
    if not len(flat):
        return None
    assert len(flat) % num_rows == 0, f"{len(flat)} routes of {num_rows} rows"
    routes_TW = torch.from_numpy(flat.reshape(num_rows, -1).copy())
    whole_TW = torch.cat([routes_TW, routes_TW[:1].expand(padding, -1)])
    return to_device(whole_TW[own.start : own.stop].contiguous(), device)


def _micro_batch(
    slices: Sequence[GroupSlice],
    rows: tuple[list[int], list[int]],
    segments: Segments,
    labels: _LabelLists,
    routes_TW: torch.Tensor | None,
    device: torch.device,
    share: RowShare,
) -> MicroBatch:
    judged_rows, judged_index = labels.judged()
    lists = (labels.logit_rows, labels.label_rows, labels.labels, labels.lengths, labels.rollout_lengths)
    tokens_T, positions_T, *of_labels, rows_J, index_N, places_N = _integers(
        (*rows, *lists, judged_rows, judged_index, labels.places), device
    )
    logit_rows_R, label_rows_N, labels_N, lengths_G, rollout_lengths_G = of_labels
    return MicroBatch(
        tuple(slices),
        Rows(tokens_T, positions_T, segments, routes_TW),
        Labels(
            logit_rows_R,
            label_rows_N,
            labels_N,
            lengths_G,
            rollout_lengths_G,
            Judged(tuple(judged_rows), rows_J, index_N),
            places_N if share.ways > 1 else None,
            sum(labels.lengths),
        ),
    )


def _self_part(lens: Sequence[int], device: torch.device) -> Part:
    return Part(tuple(lens), tuple(lens), True, device)


def _cross_part(attended: Sequence[GroupSlice], prompt_lens: Sequence[int], device: torch.device) -> Part | None:
    if not attended:
        return None
    return Part(tuple(sum(part.fed_lens) for part in attended), tuple(prompt_lens), False, device)


def _labels(slices: Sequence[GroupSlice], prompt_ends: dict[int, int], first_rows: dict[int, int]) -> _LabelLists:
    """Those of all rows, of `slices` whose prompts end before row `prompt_ends` and responses begin at `first_rows`."""
    logit_rows: list[int] = []
    label_rows: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    rollout_lengths: list[int] = []
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
        of_rollouts = part.group.rollout_lengths
        rollout_lengths += [of_rollouts[rollout] for rollout in part.rollouts]
    in_response = [i for length in lengths for i in range(length)]
    return _LabelLists(logit_rows, label_rows, labels, lengths, rollout_lengths, in_response, list(range(len(labels))))


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
