"""Prompts whose keys and values several responses share, found by their tokens.

A prompt whose beginning is the beginning of another one shares that part, too: it is a chain of segments, the nearest
first. So a continuation of a response shares its prompt with the group's other ones, and prompts share a system prompt.

Of a model with states there is only one for each segment, after its last token: there a prompt shares whole prompts.

What a turn of a rollout has sampled is kept as a part of its segment, which the prompt of the next turn begins with; so
that segment grows from turn to turn, and no token of it is computed twice.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from inference_service.engine.kv_store import KVStore, Place

Tokens = npt.NDArray[np.int64]

MIN_SHARED: Final = 32
"""Tokens that a prompt must have in common with another one to share them: each part costs a call per layer."""

MAX_IDLE: Final = 64
"""Segments kept for later requests, of which few are asked for again."""

MAX_IDLE_TURNS: Final = 1024
"""The same where turns are kept: rollouts that are not being sampled now. Each new prompt is compared with all."""

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
    key: bytes = b""
    """By which it is found: its prompt, unless one response has it alone."""

    @property
    def links(self) -> "tuple[Link, ...]":
        """What a response after this prompt attends to: this segment, and the parents' parts."""
        before = self.parent.links if self.parent else ()
        return (Link(self.place, len(self)), *shortened(before, self.num_before))

    @property
    def begins_at(self) -> Place:
        """Where the state lies that its next token follows, of a model that has states."""
        return self.place if self.num_done or self.parent is None else self.parent.place

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
    """All segments in the store; of those that nobody attends to the last ones, as long as there is room."""

    def __init__(self, store: KVStore, chains: bool = True) -> None:
        """`chains`: whether different prompts share their beginning."""
        self._store = store
        self._chains = chains
        self._shares_whole = store.has_states
        self._all: dict[bytes, Segment] = {}
        """By their prompts."""
        self._idle: dict[Segment, None] = {}
        """In the order in which they were last attended to."""
        self._max_idle = MAX_IDLE
        self._num_unshared = 0

    def acquire(self, prompt: Listing[int], shared: bool = True) -> Segment:
        """The segment whose chain is the prompt, new unless there is one, for one more response; where it is not
        `shared`, always a new one, with all of the prompt.

        Raises:
            NoRoom: the store is full.
        """
        tokens = np.array(prompt, dtype=np.int64)
        segment = self._all.get(tokens.tobytes()) if shared else self._add(tokens, None, 0, shared)
        if segment is None:
            segment = self._made_for(tokens, *self._nearest(tokens))
        for each in chain(segment):
            each.num_runs += 1
            if each.num_runs == 1:
                self._idle.pop(each, None)
                self._store.use(each.place)
        return segment

    def keep(self, segment: Segment, tokens: Tokens, source: Place, rows: range) -> None:
        """Keeps what a response has computed after the prompt of its segment: `rows` of `source`; `tokens` are all.

        If other responses attend to the segment it becomes another one.

        Raises:
            NoRoom: the store is full.
        """
        self._max_idle = MAX_IDLE_TURNS
        if not rows or tokens.tobytes() in self._all:
            return
        if segment.num_runs == 1:
            num_before = len(segment)
            self._grow(segment, tokens)
        else:
            num_before = 0
            segment = self._add(tokens, segment, len(segment.prompt))
            self._idle[segment] = None
        self._store.append(segment.place, num_before, source, rows)
        segment.num_done = len(segment)

    def _made_for(self, tokens: Tokens, nearest: Segment | None, common: int) -> Segment:
        """A segment for a new prompt, that has the first `common` tokens in common with the nearest one."""
        if nearest is not None and nearest.is_done and not nearest.num_runs and common == len(nearest.prompt):
            self._grow(nearest, tokens)
            return nearest
        # The last token is computed anew, for its logits.
        parent, num_before = nearest, min(common, len(tokens) - 1)
        while parent is not None and not self._may_follow(parent, num_before):
            num_before = min(num_before, parent.num_before)
            parent = parent.parent
        return self._add(tokens, parent, num_before if parent is not None else 0)

    def _may_follow(self, parent: Segment, num_before: int) -> bool:
        """Whether a segment may begin after so many tokens of this one's prompt."""
        if parent.depth == MAX_DEPTH or (self._shares_whole and num_before != len(parent.prompt)):
            return False
        return num_before > parent.num_before

    def _add(self, tokens: Tokens, parent: Segment | None, num_before: int, shared: bool = True) -> Segment:
        place = self._store.new(len(tokens) - num_before, is_shared=True)
        if parent is not None:
            parent.num_children += 1
        key = tokens.tobytes()
        if not shared:
            # Those of prompts are whole numbers of eight bytes.
            self._num_unshared += 1
            key = b"%015d" % self._num_unshared
        segment = self._all[key] = Segment(tokens, parent, num_before, place, key=key)
        return segment

    def _grow(self, segment: Segment, tokens: Tokens) -> None:
        """Makes it the segment of a prompt that begins with its own."""
        self._store.reserve(segment.place, len(tokens) - segment.num_before)
        del self._all[segment.key]
        segment.key = tokens.tobytes()
        self._all[segment.key] = segment
        segment.prompt = tokens

    def give_back(self, segment: Segment) -> None:
        """The response has ended. What is not computed yet is of no use to others."""
        for each in list(chain(segment)):
            each.num_runs -= 1
            if not each.num_runs:
                self._store.put_aside(each.place)
                self._idle[each] = None
                if not each.is_done and not each.num_children:
                    self._remove(each)
        while len(self._idle) > self._max_idle and self.evict():
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
        del self._all[segment.key]
        del self._idle[segment]
        self._store.free(segment.place)
        if segment.parent is not None:
            segment.parent.num_children -= 1

    def _nearest(self, tokens: Tokens) -> tuple[Segment | None, int]:
        """The one with the longest common beginning of at least `MIN_SHARED` tokens, and its length."""
        best, longest = None, MIN_SHARED - 1
        for segment in self._all.values() if self._chains else ():
            length = min(len(tokens), len(segment.prompt))
            # Of many only few are worth the whole comparison.
            if length <= longest or segment.prompt[longest] != tokens[longest]:
                continue
            differs = segment.prompt[:length] != tokens[:length]
            first = int(differs.argmax())
            common = first if differs[first] else length
            if common > longest and not (self._shares_whole and common < len(segment.prompt)):
                best, longest = segment, common
        return best, longest
