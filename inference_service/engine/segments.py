"""Prompts whose keys and values several responses share, found by their tokens.

A prompt whose beginning is the beginning of another one shares that part, too: it is a chain of segments, the nearest
first. So a continuation of a response shares its prompt with the group's other ones, and prompts share a system prompt.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from inference_service.engine.kv_store import KVStore, Place

Tokens = npt.NDArray[np.int64]

MIN_SHARED: Final = 32
"""Tokens that a prompt must have in common with another one to share them: each part costs a call per layer."""

MAX_DEPTH: Final = 4
"""Segments of a chain; a longer one costs more calls per layer than its sharing saves."""


@dataclass(slots=True, eq=False)
class Segment:
    """The tokens of a prompt after the first `num_before`, which are its parent's."""

    prompt: Tokens
    parent: "Segment | None"
    num_before: int
    place: Place
    depth: int
    num_done: int = 0
    """Number of its own tokens whose keys and values are computed."""
    users: int = 0
    """Responses and other segments that attend to it."""
    links: "tuple[Link, ...]" = field(init=False)
    """What a response after this prompt attends to: this segment, and the parents' parts."""

    def __post_init__(self) -> None:
        before = self.parent.links if self.parent else ()
        rest = shortened(before, self.num_before)
        self.links = (Link(self.place, len(self)), *rest)

    def __len__(self) -> int:
        """Number of its own tokens."""
        return len(self.prompt) - self.num_before

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self)


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
    """All segments in the store, those without users too, as long as there is room for them."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._all: dict[Segment, None] = {}
        """In the order of their last use."""

    def take(self, prompt: Listing[int]) -> Segment:
        """The segment whose chain is the prompt, new unless there is one; the caller is one more user of it.

        Raises:
            NoRoom: the store is full.
        """
        tokens = np.array(prompt, dtype=np.int64)
        relative, common = self._nearest(tokens)
        if relative is not None and common == len(tokens) == len(relative.prompt):
            segment = relative
        else:
            parent = relative if relative is not None and common >= MIN_SHARED and relative.depth < MAX_DEPTH else None
            # The last token is computed anew, for its logits.
            num_before = min(common, len(tokens) - 1) if parent else 0
            while parent is not None and parent.parent is not None and num_before <= parent.num_before:
                parent = parent.parent
            place = self._store.new(len(tokens) - num_before)
            segment = Segment(tokens, parent, num_before, place, parent.depth + 1 if parent else 1)
            if parent is not None:
                parent.users += 1
        self._all.pop(segment, None)
        self._all[segment] = None
        segment.users += 1
        return segment

    def give_back(self, segment: Segment) -> None:
        """The caller is no longer a user. What is not computed yet is of no use to others."""
        segment.users -= 1
        if not segment.users and not segment.is_done:
            self._remove(segment)

    def evict(self) -> bool:
        """Frees the segment without users that was used longest ago; false if there is none."""
        for segment in self._all:
            if not segment.users:
                self._remove(segment)
                return True
        return False

    def clear(self) -> None:
        self._all.clear()

    def unfinished(self) -> list[Segment]:
        """Those that are to be computed, and can be: after their parents."""
        return [
            segment
            for segment in self._all
            if not segment.is_done
            and (segment.parent is None or segment.parent.num_done >= segment.num_before - segment.parent.num_before)
        ]

    def _remove(self, segment: Segment) -> None:
        del self._all[segment]
        self._store.free(segment.place)
        if segment.parent is not None:
            self.give_back(segment.parent)

    def _nearest(self, tokens: Tokens) -> tuple[Segment | None, int]:
        best, longest = None, 0
        for segment in self._all:
            length = min(len(tokens), len(segment.prompt))
            differ = np.flatnonzero(segment.prompt[:length] != tokens[:length])
            common = int(differ[0]) if len(differ) else length
            if common > longest or (common == longest and best is not None and len(segment.prompt) == len(tokens)):
                best, longest = segment, common
        return best, longest
