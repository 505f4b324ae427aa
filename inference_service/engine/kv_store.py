"""Keys and values of token segments, in shelves of equal capacity, so that attention reads them without a gather.

A segment is a run of tokens whose keys and values lie together: a prompt that several responses share, or the own tokens
of one response. A shelf holds the segments of one capacity (powers of two) one after the other, without gaps: the last
segment takes the slot of one that is freed, and one that outgrows its shelf moves to the next.

Shapes: N slots, K key-value heads, C capacity, D head size.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

MIN_CAPACITY: Final = 64
GROWTH: Final = 1.5


class NoRoom(Exception):
    """The store is full."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a segment lies; `slot` changes when another segment is freed, `shelf` when it grows."""

    shelf: "Shelf"
    slot: int


@dataclass(slots=True, eq=False)
class Shelf:
    """The segments of one capacity; `keys` and `values` are [N, K, C, D] per layer, of which the first are in use."""

    capacity: int
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    places: list[Place] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[0]

    def resize(self, num_slots: int) -> None:
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old.new_empty((num_slots, *old.shape[1:]))
                tensors[layer][: len(self.places)] = old[: len(self.places)]

    def copy(self, slot: int, target: "Shelf", target_slot: int) -> None:
        for mine, other in ((self.keys, target.keys), (self.values, target.values)):
            for old, new in zip(mine, other, strict=True):
                new[target_slot, :, : self.capacity] = old[slot]


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
    ) -> None:
        self.num_layers = num_layers
        self.max_tokens = max_tokens
        self.generation = 0
        """Changes whenever a segment gets another place, or is freed."""
        self._shape = (num_kv_heads, head_dim)
        self._dtype = dtype
        self._device = device
        self._shelves: dict[int, Shelf] = {}

    @property
    def num_tokens(self) -> int:
        """Capacity of the segments in the store."""
        return sum(shelf.capacity * len(shelf.places) for shelf in self._shelves.values())

    def new(self, num_tokens: int) -> Place:
        """A place for a segment of up to `num_tokens` tokens.

        Raises:
            NoRoom: the store is full.
        """
        shelf = self._shelf(num_tokens)
        if len(shelf.places) == shelf.num_slots:
            self._grow(shelf)
        place = Place(shelf, len(shelf.places))
        shelf.places.append(place)
        self.generation += 1
        return place

    def reserve(self, place: Place, num_tokens: int) -> None:
        """Makes the place hold `num_tokens` tokens, with what is in it.

        Raises:
            NoRoom: the store is full; the place is unchanged.
        """
        if num_tokens <= place.shelf.capacity:
            return
        larger = self.new(num_tokens)
        place.shelf.copy(place.slot, larger.shelf, larger.slot)
        self.free(place)
        place.shelf, place.slot = larger.shelf, larger.slot
        place.shelf.places[place.slot] = place

    def free(self, place: Place) -> None:
        shelf = place.shelf
        last = shelf.places.pop()
        if last is not place:
            shelf.copy(last.slot, shelf, place.slot)
            shelf.places[place.slot] = last
            last.slot = place.slot
        self.generation += 1

    def clear(self) -> None:
        """Frees all places, and their memory."""
        self._shelves.clear()
        self.generation += 1

    def _shelf(self, num_tokens: int) -> Shelf:
        capacity = max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())
        if capacity not in self._shelves:
            num_kv_heads, head_dim = self._shape
            tensors = [
                [
                    torch.empty((0, num_kv_heads, capacity, head_dim), dtype=self._dtype, device=self._device)
                    for _ in range(self.num_layers)
                ]
                for _ in range(2)
            ]
            self._shelves[capacity] = Shelf(capacity, *tensors)
        return self._shelves[capacity]

    def _grow(self, shelf: Shelf) -> None:
        if self._slots_left(shelf) < 1:
            for other in self._shelves.values():
                other.resize(len(other.places))
        if (left := self._slots_left(shelf)) < 1:
            raise NoRoom
        shelf.resize(min(shelf.num_slots + left, max(4, int(GROWTH * shelf.num_slots))))

    def _slots_left(self, shelf: Shelf) -> int:
        allocated = sum(each.capacity * each.num_slots for each in self._shelves.values())
        return (self.max_tokens - allocated) // shelf.capacity
