"""Keys and values of token segments, in shelves of equal capacity, so that attention reads them without a gather.

A segment is a run of tokens whose keys and values lie together: a prompt that responses share, or the own tokens of one
response. A shelf holds the segments of one capacity (powers of two) one after the other, without gaps and those in use
first: segments change their slots for that, and one that outgrows its shelf moves to the next.

Of a model with experts also those that each token was sent to. Of one with gated delta nets each segment also has a
state: that of these layers after the last of its tokens, and their last inputs. These lie on a shelf of their own,
where a state takes as much room as some tokens do; they stay where they are while their segment outgrows its shelf.

Shapes: N slots, K key-value heads, C capacity, D head size, W layers times chosen experts; of gated delta nets H key
heads, R value heads of each, B dimensions of a key, V of a value, X channels of the convolution, T its width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import torch

from async_rl.shared.model_parts import DeltaNet

MIN_CAPACITY: Final = 64
GROWTH: Final = 1.5
STATES: Final = "states"
"""Their shelf's key."""


class NoRoom(Exception):
    """The store is full."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a segment lies; changes with the store's `generation` only."""

    shelf: "Shelf"
    slot: int
    state: "Place | None" = None
    """Where its state lies; None for a model without any."""

    @property
    def is_in_use(self) -> bool:
        return self.slot < self.shelf.num_in_use


@dataclass(slots=True, eq=False)
class Shelf:
    """The segments of one capacity, of which the first slots are taken, or their states.

    `tensors` are, each of all layers, keys and values, [N, K, C, D], where a layer with a gated delta net has no heads,
    and routes, [N, 1, C, W], int16, or nothing for a dense model; of states these, [N, H * R, B, V], float32, and the
    last rows, [N, 1, T - 1, X].
    """

    capacity: int
    """Of states: as many tokens as take the room of one."""
    is_shared: bool
    tensors: tuple[list[torch.Tensor], ...]
    places: list[Place] = field(default_factory=list)
    num_in_use: int = 0

    @property
    def keys(self) -> list[torch.Tensor]:
        return self.tensors[0]

    @property
    def values(self) -> list[torch.Tensor]:
        return self.tensors[1]

    @property
    def routes(self) -> list[torch.Tensor]:
        return self.tensors[2]

    @property
    def states(self) -> list[torch.Tensor]:
        return self.tensors[0]

    @property
    def last_rows(self) -> list[torch.Tensor]:
        return self.tensors[1]

    @property
    def num_slots(self) -> int:
        return self.tensors[0][0].shape[0]

    def resize(self, num_slots: int) -> None:
        for tensors in self.tensors:
            for layer, old in enumerate(tensors):
                # What is masked must be finite all the same.
                tensors[layer] = old.new_zeros((num_slots, *old.shape[1:]))
                tensors[layer][: len(self.places)] = old[: len(self.places)]

    def copy(self, slot: int, target: "Shelf", target_slot: int) -> None:
        for mine, other in zip(self.tensors, target.tensors, strict=True):
            for old, new in zip(mine, other, strict=True):
                new[target_slot, :, : old.shape[2]] = old[slot]

    def swap(self, place: Place, slot: int) -> None:
        """Exchanges what lies at a place with what lies in a slot."""
        other = self.places[slot]
        if other is place:
            return
        for tensor in chain(*self.tensors):
            tensor[[place.slot, slot]] = tensor[[slot, place.slot]]
        self.places[place.slot], self.places[slot] = other, place
        place.slot, other.slot = slot, place.slot


class KVStore:
    """At most `max_tokens` tokens, free slots and unused capacity included."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        width: Callable[[int], int] = int,
        num_routes: int = 0,
        delta: DeltaNet | None = None,
        state_tokens: int = 0,
    ) -> None:
        """`width`: the number of keys that attention over some number of them reads. `num_routes`: W. `delta`: which
        layers have gated delta nets, and their sizes; a state counts as `state_tokens` tokens."""
        self._width = width
        self._num_routes = num_routes
        self.max_tokens = max_tokens
        self.generation = 0
        """Changes whenever a segment gets another place, or is freed."""
        without = () if delta is None else delta.layers
        self._heads = [0 if layer in without else num_kv_heads for layer in range(num_layers)]
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._shelves: dict[tuple[bool, int] | str, Shelf] = {}
        self._delta = delta
        self._state_tokens = state_tokens

    @property
    def has_states(self) -> bool:
        return self._delta is not None

    @property
    def num_tokens(self) -> int:
        """Capacity of the segments in the store, with what their states count; any thread may ask."""
        return sum(shelf.capacity * len(shelf.places) for shelf in list(self._shelves.values()))

    def new(self, num_tokens: int, is_shared: bool) -> Place:
        """A place for a segment of up to `num_tokens` tokens, not in use yet; prompts have shelves of their own. Its
        state is one of no tokens: zeros.

        Raises:
            NoRoom: the store is full.
        """
        place = self._put(self._shelf(num_tokens, is_shared))
        if self._delta is not None:
            try:
                place.state = state = self._put(self._state_shelf(self._delta))
            except NoRoom:
                self.free(place)
                raise
            for tensor in chain(*state.shelf.tensors):
                tensor[state.slot] = 0
        return place

    def _put(self, shelf: Shelf) -> Place:
        if len(shelf.places) == shelf.num_slots:
            self._grow(shelf)
        place = Place(shelf, len(shelf.places))
        shelf.places.append(place)
        self.generation += 1
        return place

    def use(self, place: Place) -> None:
        """Puts the place among those that steps read."""
        place.shelf.swap(place, place.shelf.num_in_use)
        place.shelf.num_in_use += 1
        self.generation += 1

    def put_aside(self, place: Place) -> None:
        """Steps read it no longer; what is in it stays."""
        place.shelf.num_in_use -= 1
        place.shelf.swap(place, place.shelf.num_in_use)
        self.generation += 1

    def reserve(self, place: Place, num_tokens: int) -> None:
        """Makes a place hold `num_tokens` tokens, with what is in it.

        Raises:
            NoRoom: the store is full; the place is unchanged.
        """
        if self._width(num_tokens) <= place.shelf.capacity:
            return
        larger, is_in_use = self._put(self._shelf(num_tokens, place.shelf.is_shared)), place.is_in_use
        place.shelf.copy(place.slot, larger.shelf, larger.slot)
        self._take_out(place)
        place.shelf, place.slot = larger.shelf, larger.slot
        place.shelf.places[place.slot] = place
        if is_in_use:
            self.use(place)

    def append(self, place: Place, num_tokens: int, source: Place, rows: range) -> None:
        """Copies tokens of another place, its last ones, after the first `num_tokens` of this one, which then has the
        other one's state, and that one this one's.

        Raises:
            NoRoom: the store is full; the place is unchanged.
        """
        self.reserve(place, num_tokens + len(rows))
        for mine, others in zip(place.shelf.tensors, source.shelf.tensors, strict=True):
            for new, old in zip(mine, others, strict=True):
                new[place.slot, :, num_tokens : num_tokens + len(rows)] = old[source.slot, :, rows.start : rows.stop]
        place.state, source.state = source.state, place.state

    def free(self, place: Place) -> None:
        self._take_out(place)
        if place.state is not None:
            self._take_out(place.state)

    def _take_out(self, place: Place) -> None:
        if place.is_in_use:
            self.put_aside(place)
        shelf = place.shelf
        last = shelf.places.pop()
        if last is not place:
            shelf.copy(last.slot, shelf, place.slot)
            shelf.places[place.slot] = last
            last.slot = place.slot
        self.generation += 1

    def clear(self) -> None:
        """Frees all places, and their memory at once: shelves and places refer to each other."""
        for shelf in self._shelves.values():
            for tensors in shelf.tensors:
                tensors.clear()
        self._shelves.clear()
        self.generation += 1

    def _shelf(self, num_tokens: int, is_shared: bool) -> Shelf:
        capacity = max(MIN_CAPACITY, 1 << (self._width(num_tokens) - 1).bit_length())
        if (is_shared, capacity) not in self._shelves:
            keys, values = (
                [self._empty(self._dtype, heads, capacity, self._head_dim) for heads in self._heads] for _ in range(2)
            )
            routes = [self._empty(torch.int16, 1, capacity, self._num_routes)] if self._num_routes else []
            self._shelves[is_shared, capacity] = Shelf(capacity, is_shared, (keys, values, routes))
        return self._shelves[is_shared, capacity]

    def _state_shelf(self, delta: DeltaNet) -> Shelf:
        if STATES not in self._shelves:
            channels = delta.num_key_heads * delta.mixed_size
            num = len(delta.layers)
            states = [self._empty(torch.float32, delta.num_value_heads, delta.key_dim, delta.value_dim)] * num
            last_rows = [self._empty(self._dtype, 1, delta.conv_width - 1, channels)] * num
            self._shelves[STATES] = Shelf(self._state_tokens, False, (states, last_rows))
        return self._shelves[STATES]

    def _empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Of no slots."""
        return torch.empty((0, *shape), dtype=dtype, device=self._device)

    def _grow(self, shelf: Shelf) -> None:
        if self._slots_left(shelf) < 1:
            for other in self._shelves.values():
                other.resize(len(other.places))
        if (left := self._slots_left(shelf)) < 1:
            raise NoRoom
        # Half of what is left, at most: a shelf that took all of it would give it back, with a copy of the whole store,
        # to the next one that needs a slot.
        shelf.resize(min(shelf.num_slots + (left + 1) // 2, max(4, int(GROWTH * shelf.num_slots))))

    def _slots_left(self, shelf: Shelf) -> int:
        allocated = sum(each.capacity * each.num_slots for each in self._shelves.values())
        return (self.max_tokens - allocated) // shelf.capacity
