"""What the layers of a model read in a step: the shelves of the store, and which row belongs to which slot.

Shapes: R responses that decode, N slots in use of a shelf, L keys; of gated delta nets T rows, S sequences of them, E
places of rows with the W - 1 rows before each sequence, which its convolution over W rows reads.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, NamedTuple

import torch

from async_rl.shared.delta_rule import Chunks, rows_of_chunk
from inference_service.engine.kernels import Kernels, Width, length_bias
from inference_service.engine.kv_store import Place, Shelf
from inference_service.engine.schedule import Fed, Run
from inference_service.engine.segments import Link

CALL_ROWS: Final = 32
"""Responses whose attention costs about as much as one more call."""


@dataclass(slots=True, eq=False)
class OwnPart:
    """The own tokens of the responses in one shelf, all of its slots; `queries` are consecutive responses."""

    shelf: Shelf
    queries: slice
    slots: torch.Tensor
    """[queries]"""
    query_of_slot: torch.Tensor
    """[N], any response for a slot without one."""
    positions: torch.Tensor
    """[queries]: where the new keys belong."""
    length: int
    bias: torch.Tensor | None
    """[N, 1, 1, L]; None if all are of one length."""
    lengths: torch.Tensor
    """[N]: own tokens with the new one."""


@dataclass(slots=True, eq=False)
class SharedPart:
    """Segments in consecutive slots of a shelf, with up to `width` responses each that attend to them."""

    shelf: Shelf
    slots: slice
    queries: torch.Tensor
    """[N * width], repeated where there are fewer."""
    width: int
    length: int
    bias: torch.Tensor | None
    """[N, 1, width, L] or [N, 1, 1, L]; None if all are of one length."""
    responses: torch.Tensor
    """[M]: the responses in this part, each once, in their order."""
    places: torch.Tensor
    """[M]: where these are among `queries`."""
    starts: torch.Tensor
    """[N * width]: the position of the segment's first token, for each of `queries`."""


@dataclass(slots=True, eq=False)
class Span:
    """Consecutive new tokens of one segment: the queries, and where they belong."""

    queries: slice
    place: Place
    start: int
    links: tuple[Link, ...]
    base: int
    """The position of the place's first token."""


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """Where the rows of a step go in layers with a gated delta net.

    Its sequences are the responses that decode, a row each, and then the spans, the longest first, whose rows lie in
    chunks. All index tensors are int64.

    Attributes:
        shelf: of states.
        begins_S, ends_S: slots of the states that a sequence begins with, and of those after it.
        num_wide: E.
        wide_T: the place of each row among E.
        before, last: places among E, W - 1 of each sequence: of the rows before it, and of its last rows with these.
        chunk_rows, counts, num_places: of the chunks of spans, as `Chunks` has them.
        places: of the rows of spans.
    """

    shelf: Shelf
    begins_S: torch.Tensor
    ends_S: torch.Tensor
    num_wide: int
    wide_T: torch.Tensor
    before: torch.Tensor
    last: torch.Tensor
    chunk_rows: int
    counts: tuple[int, ...]
    num_places: int
    places: torch.Tensor


@dataclass(slots=True, eq=False)
class StepParts:
    """Everything that the layers need to know of a step."""

    kernels: Kernels
    num_responses: int
    own: Listing[OwnPart]
    shared: Listing[SharedPart]
    spans: Listing[Span]
    positions: torch.Tensor
    """[R]: of the responses' new tokens."""
    longest: int
    """Tokens of the longest context of any query."""
    num_padding: int = 0
    """Rows after all others that nothing reads."""
    delta: DeltaPart | None = None
    """None for a model without gated delta nets."""


def own_parts(decoding: Listing[Run], device: torch.device, key_width: Width = int) -> list[OwnPart]:
    """`decoding` is sorted by shelf."""
    parts = []
    begin = 0
    for _, members in groupby(decoding, key=lambda run: place_of(run).shelf.capacity):
        runs = list(members)
        shelf = place_of(runs[0]).shelf
        query_of_slot = [begin] * shelf.num_in_use
        lengths = [1] * shelf.num_in_use
        for query, run in enumerate(runs, start=begin):
            slot = place_of(run).slot
            query_of_slot[slot] = query
            lengths[slot] = run.num_fed + 1
        longest = key_width(max(lengths))
        parts.append(
            OwnPart(
                shelf,
                slice(begin, begin + len(runs)),
                torch.tensor([place_of(run).slot for run in runs], device=device),
                torch.tensor(query_of_slot, device=device),
                torch.tensor([run.num_fed for run in runs], device=device),
                longest,
                length_bias(lengths, longest, device),
                torch.tensor(lengths, device=device),
            )
        )
        begin += len(runs)
    return parts


def place_of(run: Run) -> Place:
    assert run.place is not None, "a run that feeds tokens has a place for them"
    return run.place


def shared_parts(decoding: Listing[Run], device: torch.device, key_width: Width = int) -> list[SharedPart]:
    """Each response is once in a part: the levels of chains are parts of their own."""
    members: defaultdict[tuple[int, int], defaultdict[int, list[_Member]]]
    members = defaultdict(lambda: defaultdict(list))
    shelves: dict[int, Shelf] = {}
    for query, run in enumerate(decoding):
        start = run.num_shared
        for level, link in enumerate(run.links):
            shelf = link.place.shelf
            shelves[shelf.capacity] = shelf
            start -= link.length
            members[level, shelf.capacity][link.place.slot].append(_Member(query, link.length, start))
    return [
        _shared_part(
            shelves[capacity], slots, [by_slot[slot] for slot in range(slots.start, slots.stop)], device, key_width
        )
        for (_, capacity), by_slot in members.items()
        for slots in bands({slot: len(found) for slot, found in by_slot.items()})
    ]


class _Member(NamedTuple):
    """A response, the tokens of a segment that it attends to, and the position of the first one."""

    query: int
    length: int
    start: int


def bands(widths: Mapping[int, int]) -> list[slice]:
    """Ranges of slots to be read together; `widths` has the number of responses of those that are read at all.

    One product is as wide as its widest slot for all of its slots, and a further product costs about `CALL_ROWS` rows.
    """
    found: list[slice] = []
    widest = 0
    for slot in sorted(widths):
        if found:
            start, stop = found[-1].start, found[-1].stop
            together = (slot + 1 - start) * max(widest, widths[slot])
            if together <= (stop - start) * widest + widths[slot] + CALL_ROWS:
                found[-1], widest = slice(start, slot + 1), max(widest, widths[slot])
                continue
        found.append(slice(slot, slot + 1))
        widest = widths[slot]
    return found


def _shared_part(
    shelf: Shelf,
    slots: slice,
    members: Listing[Listing[_Member]],
    device: torch.device,
    key_width: Width,
) -> SharedPart:
    """`members` has those of each slot."""
    width = max(len(found) for found in members)
    longest = key_width(max(member.length for found in members for member in found))
    queries: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    place_of_response: dict[int, int] = {}
    for i, found in enumerate(members):
        place_of_response |= {member.query: i * width + j for j, member in enumerate(found)}
        padded = [*found, *[found[0] if found else _Member(0, 1, 0)] * (width - len(found))]
        queries += [member.query for member in padded]
        lengths += [member.length for member in padded]
        starts += [member.start for member in padded]
    bias = length_bias(lengths, longest, device)
    if bias is not None:
        bias = bias.view(len(members), 1, width, longest)
        if all(len({member.length for member in found}) <= 1 for found in members):
            bias = bias[:, :, :1]
    responses = sorted(place_of_response)
    return SharedPart(
        shelf,
        slots,
        torch.tensor(queries, device=device),
        width,
        longest,
        bias,
        torch.tensor(responses, device=device),
        torch.tensor([place_of_response[query] for query in responses], device=device),
        torch.tensor(starts, device=device),
    )


def delta_part(decoding: Listing[Run], fed: Listing[Fed], width: int, device: torch.device) -> DeltaPart:
    """For a convolution over `width` rows; the rows of a step are those of `decoding`, then those of `fed`."""
    num, reach = len(decoding), width - 1
    lens = [1] * num + [len(each.token_ids) for each in fed]
    chunk_rows = rows_of_chunk(max(lens[num:], default=1))
    chunks = Chunks.of(lens[num:], chunk_rows)
    order = [*range(num), *(num + i for i in chunks.order)]
    sequences = [*decoding, *(each.what for each in fed)]
    begins, ends = (
        [_state_of(place) for place in places]
        for places in zip(*((sequences[i].begins_at, sequences[i].place) for i in order), strict=True)
    )
    firsts = [start + (i + 1) * reach for i, start in enumerate(accumulate(lens, initial=0))]
    indices = (
        [state.slot for state in begins],
        [state.slot for state in ends],
        [first + row for first, length in zip(firsts, lens, strict=False) for row in range(length)],
        [firsts[i] - back for i in order for back in range(reach, 0, -1)],
        [firsts[i] + lens[i] - back for i in order for back in range(reach, 0, -1)],
        [place for own in chunks.places for place in own],
    )
    flat = torch.tensor([x for some in indices for x in some], dtype=torch.int64, device=device)
    begins_S, ends_S, wide_T, before, last, places = flat.split([len(some) for some in indices])
    return DeltaPart(
        shelf=ends[0].shelf,
        begins_S=begins_S,
        ends_S=ends_S,
        num_wide=sum(lens) + len(lens) * reach,
        wide_T=wide_T,
        before=before,
        last=last,
        chunk_rows=chunk_rows,
        counts=chunks.counts,
        num_places=chunks.num_places,
        places=places,
    )


def _state_of(place: Place | None) -> Place:
    assert place is not None and place.state is not None, "what is computed has a place, with a state"
    return place.state
