"""Prompts whose keys and values several responses share, found by their tokens.

A prompt whose beginning is the beginning of another one shares that part, too: it is a chain of segments, the nearest
first. So a continuation of a response shares its prompt with the group's other ones, and prompts share a system prompt.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from inference_service.engine.kv_store import KVStore, Place

Tokens = npt.NDArray[np.int64]

MIN_SHARED: Final = 32
"""Tokens that a prompt must have in common with another one to share them: each part costs a call per layer."""

MAX_IDLE: Final = 64
"""Segments kept for later requests: each new prompt is compared with all."""

MAX_DEPTH: Final = 4
"""Segments of a chain; a longer one costs more calls per layer than its sharing saves."""


@dataclass(slots=True, eq=False)
class Segment:
    """The tokens of a prompt after the first `num_before`, which are its parent's."""

    prompt: Tokens
    parent: "Segment | None"
    num_before: int
    place: Place
    num_done: int = 0
    """Number of its own tokens whose keys and values are computed."""
    num_runs: int = 0
    """Responses that attend to it."""
    num_children: int = 0
    links: "tuple[Link, ...]" = field(init=False)
    """What a response after this prompt attends to: this segment, and the parents' parts."""

    def __post_init__(self) -> None:
        before = self.parent.links if self.parent else ()
        rest = shortened(before, self.num_before)
        self.links = (Link(self.place, len(self)), *rest)

    @property
    def depth(self) -> int:
        """Number of segments in its chain."""
        return len(list(chain(self)))

    def __len__(self) -> int:
        """Number of its own tokens."""
        return len(self.prompt) - self.num_before

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self)


def chain(segment: Segment) -> Iterator[Segment]:
    """The segment, its parent, and so on."""
    each: Segment | None = segment
    while each is not None:
        yield each
        each = each.parent


@dataclass(frozen=True, slots=True)
class Link:
    """The first `length` tokens of a place."""

    place: Place
    length: int


def shortened(links: "tuple[Link, ...]", num_tokens: int) -> "tuple[Link, ...]":
    """The links to the first `num_tokens` tokens of a prompt; the given ones are its last part first."""
    found: list[Link] = []
    for link in reversed(links):
        if num_tokens <= 0:
            break
        found.append(Link(link.place, min(link.length, num_tokens)))
        num_tokens -= link.length
    return tuple(reversed(found))


class Segments:
    """All segments in the store; of those that nobody attends to the last `MAX_IDLE` ones, as long as there is room."""

    def __init__(self, store: KVStore, chains: bool = True) -> None:
        """`chains`: whether different prompts share their beginning."""
        self._store = store
        self._chains = chains
        self._all: dict[bytes, Segment] = {}
        """By their prompts."""
        self._idle: dict[Segment, None] = {}
        """In the order in which they were last attended to."""

    def take(self, prompt: Listing[int]) -> Segment:
        """The segment whose chain is the prompt, new unless there is one, for one more response.

        Raises:
            NoRoom: the store is full.
        """
        tokens = np.array(prompt, dtype=np.int64)
        segment = self._all.get(tokens.tobytes())
        if segment is None:
            segment = self._all[tokens.tobytes()] = self._new(tokens, *self._nearest(tokens))
        for each in chain(segment):
            each.num_runs += 1
            if each.num_runs == 1:
                self._idle.pop(each, None)
                self._store.use(each.place)
        return segment

    def _new(self, tokens: Tokens, parent: Segment | None, common: int) -> Segment:
        # The last token is computed anew, for its logits.
        num_before = min(common, len(tokens) - 1)
        while parent is not None and (num_before <= parent.num_before or parent.depth == MAX_DEPTH):
            num_before = min(num_before, parent.num_before)
            parent = parent.parent
        if parent is None:
            num_before = 0
        place = self._store.new(len(tokens) - num_before, is_shared=True)
        if parent is not None:
            parent.num_children += 1
        return Segment(tokens, parent, num_before, place)

    def give_back(self, segment: Segment) -> None:
        """The response has ended. What is not computed yet is of no use to others."""
        for each in list(chain(segment)):
            each.num_runs -= 1
            if not each.num_runs:
                self._store.put_aside(each.place)
                self._idle[each] = None
                if not each.is_done and not each.num_children:
                    self._remove(each)
        while len(self._idle) > MAX_IDLE and self.evict():
            pass

    def evict(self) -> bool:
        """Frees the segment that nobody attends to and that was used longest ago; false if there is none."""
        for segment in self._idle:
            if not segment.num_children:
                self._remove(segment)
                return True
        return False

    def clear(self) -> None:
        self._all.clear()
        self._idle.clear()

    def unfinished(self) -> list[Segment]:
        """Those that are to be computed, and can be: after their parents."""
        return [
            segment
            for segment in self._all.values()
            if segment.num_runs
            and not segment.is_done
            and (segment.parent is None or segment.parent.num_done >= segment.num_before - segment.parent.num_before)
        ]

    def _remove(self, segment: Segment) -> None:
        del self._all[segment.prompt.tobytes()]
        del self._idle[segment]
        self._store.free(segment.place)
        if segment.parent is not None:
            segment.parent.num_children -= 1

    def _nearest(self, tokens: Tokens) -> tuple[Segment | None, int]:
        """The one with the longest common beginning of at least `MIN_SHARED` tokens, and its length."""
        best, longest = None, MIN_SHARED - 1
        for segment in self._all.values() if self._chains else ():
            length = min(len(tokens), len(segment.prompt))
            differ = np.flatnonzero(segment.prompt[:length] != tokens[:length])
            common = int(differ[0]) if len(differ) else length
            if common > longest:
                best, longest = segment, common
        return best, longest
