"""What attention reads in a step: the shelves of the store, and which query belongs to which slot.

Shapes: R responses that decode, N slots in use of a shelf, L keys.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import torch

from inference_service.engine.kernels import Kernels, Width, length_bias
from inference_service.engine.kv_store import Place, Shelf
from inference_service.engine.schedule import Run
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


@dataclass(slots=True, eq=False)
class StepParts:
    """Everything that attention needs to know of a step."""

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
