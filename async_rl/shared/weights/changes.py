"""What changed of a stream of weights since the last one, in fewer bytes: exact, and checked as a whole stream is.

At small learning rates most bfloat16 weights round to what they were. A sender keeps the bytes that it sent last, and
sends of each tensor the words (2 or 4 bytes, 1 of one-byte dtypes) that differ: with their places, with one bit for
each word, or the whole tensor, whichever is least. A receiver writes them over what it has. Both hash the whole tensors
afterwards (`fingerprint.py`), so a receiver that had something else is found.

In front is an int32 for each tensor: `num_changed`, or `WHOLE`, or `BITS - num_changed`. Then come, tensor by tensor,
in parts that are padded to 4 bytes: how many changed in each block of `BLOCK_WORDS` as int32, their places in it as
uint16, and words; or bits, the first in the lowest one, and words; or all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from async_rl.errors import PublishError
from async_rl.shared.weights.fingerprint import TensorSpec

WHOLE, BITS = -1, -2

_WORDS = {1: torch.uint8, 2: torch.int16}
BLOCK_WORDS, PLACE_BYTES = 2**16, 2
MOST_CHANGED = 2**31 + BITS
"""Of a tensor that is not sent whole: the number in front is an int32."""

PIECE_WORDS = 4 * BLOCK_WORDS
"""Compared at once on the host: what two passes read is in the processor's cache for the second."""

GoesOn = Callable[[int, int], bool]


class LastSent:
    """The bytes of the last stream, and its fingerprint; None if there is none, or it was not sent completely."""

    def __init__(self) -> None:
        self.fingerprint: str | None = None
        self._bytes: dict[TensorSpec, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() for each in self._bytes.values())

    def has(self, spec: TensorSpec) -> bool:
        return spec in self._bytes

    def keep(self, spec: TensorSpec, data: torch.Tensor) -> None:
        """`data` are the bytes of the tensor as they are sent now, uint8 [num_bytes]."""
        kept = self._bytes.get(spec)
        if kept is None:
            self._bytes[spec] = data.clone()
        elif kept.data_ptr() != data.data_ptr():
            kept.copy_(data)

    def replace(
        self, spec: TensorSpec, data: torch.Tensor, goes_on: GoesOn = lambda compared_bytes, changed_bytes: True
    ) -> tuple[int, list[torch.Tensor]] | None:
        """Keeps `data`, and returns what changed: the number for the front, and parts, each uint8 [its bytes].

        A part may be what is kept, and is right until the tensor is replaced again.

        Args:
            goes_on: is told of each piece how many bytes were compared, and about how many of changes found. Where it
                returns False, None is returned, and only a part of `data` is kept.
        """
        before = self._bytes.get(spec)
        if before is None:
            self.keep(spec, data)
            changed: tuple[int, list[torch.Tensor]] | None = (WHOLE, [])
        else:
            changed = replace_words(words_of(spec, before), words_of(spec, data), goes_on)
        return (WHOLE, [_padded(self._bytes[spec])]) if changed is not None and changed[0] == WHOLE else changed

    def tensors(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """The bytes that are kept, uint8 [num_bytes] each, in this order."""
        return ((spec, self._bytes[spec]) for spec in specs)


def words_of(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers [num_words] that are compared and sent as one each."""
    size = spec.dtype.itemsize
    return data.view(_WORDS.get(size, torch.int32 if size % 4 == 0 else torch.uint8))


def replace_words(
    before_N: torch.Tensor, now_N: torch.Tensor, goes_on: GoesOn
) -> tuple[int, list[torch.Tensor]] | None:
    """Makes the first equal to the second, and returns what `LastSent.replace` does; no parts where all are sent."""
    num_words, size = now_N.numel(), now_N.element_size()
    counts, places, words = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    piece_words = PIECE_WORDS if now_N.device.type == "cpu" else max(num_words, 1)
    for before_P, now_P in zip(before_N.split(piece_words), now_N.split(piece_words), strict=True):
        places_C = _places_where_unequal(before_P, now_P)
        words.append(now_P[places_C])
        before_P[places_C] = words[-1]
        ends_B = _block_starts(_num_blocks(now_P.numel()), now_N.device) + BLOCK_WORDS
        counts.append(torch.searchsorted(places_C, ends_B).diff(prepend=places_C.new_zeros(1)).to(torch.int32))
        # A uint16 in the bits of an int16, which torch computes with.
        places.append(places_C.to(torch.int16))
        if not goes_on(now_P.nbytes, min(places_C.numel() * (PLACE_BYTES + size), now_P.nbytes)):
            return None
    num_changed = sum(map(torch.Tensor.numel, words))
    if num_changed == 0:
        return 0, []
    by_places = 4 * _num_blocks(num_words) + num_changed * (PLACE_BYTES + size)
    by_bits = -(-num_words // 8) + num_changed * size
    if min(by_places, by_bits) >= num_words * size or num_changed > MOST_CHANGED:
        return WHOLE, []
    counts_B, places_C, words_C = map(torch.cat, (counts, places, words))
    changed = _padded(words_C.view(torch.uint8))
    if by_places <= by_bits:
        return num_changed, [counts_B.view(torch.uint8), _padded(places_C.view(torch.uint8)), changed]
    differs_N = torch.zeros(num_words, dtype=torch.bool, device=now_N.device)
    differs_N[_places_in_all(counts_B, places_C)] = True
    return BITS - num_changed, [_padded(pack(differs_N)), changed]


def _places_where_unequal(before_P: torch.Tensor, now_P: torch.Tensor) -> torch.Tensor:
    if now_P.device.type != "cpu":
        return (before_P != now_P).nonzero().view(-1)
    # numpy needs half of torch's time.
    return torch.from_numpy(np.flatnonzero(before_P.numpy() != now_P.numpy()))


def _places_in_all(counts_B: torch.Tensor, places_C: torch.Tensor) -> torch.Tensor:
    """Of places in blocks, int16 [C], of which each block has so many, int32 [B]; int64 [C]."""
    starts_B = _block_starts(len(counts_B), counts_B.device)
    return (places_C.long() & (BLOCK_WORDS - 1)).add_(starts_B.repeat_interleave(counts_B, output_size=len(places_C)))


def _block_starts(num_blocks: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_blocks, device=device) * BLOCK_WORDS


def _num_blocks(num_words: int) -> int:
    return -(-num_words // BLOCK_WORDS)


def front(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """The numbers of all tensors as bytes, uint8 [4 * num_tensors]."""
    return torch.tensor(numbers, dtype=torch.int32, device=device).view(torch.uint8)


def apply(
    data: torch.Tensor, specs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Writes what changed over the tensors of these names, each contiguous, and yields (spec, tensor) in this order.

    Args:
        data: what a sender made of the same specs, uint8 [num_bytes].

    Raises:
        PublishError: it is not that.
    """
    place = 4 * len(specs)
    numbers = data[:place].view(torch.int32).tolist() if len(data) >= place else []

    def take(num_bytes: int) -> torch.Tensor:
        nonlocal place
        start, place = place, place + num_bytes + -num_bytes % 4
        if place > len(data):
            raise PublishError(f"the changes of the weights end after {len(data)} bytes: expected {place} or more")
        return data[start : start + num_bytes]

    if len(numbers) != len(specs):
        raise PublishError(f"the changes of the weights have {len(data)} bytes: expected {place} or more")
    for spec, number in zip(specs, numbers, strict=True):
        words_N = words_of(spec, tensors[spec.name].view(-1).view(torch.uint8))
        num_words, size = words_N.numel(), words_N.element_size()
        num_changed = num_words if number == WHOLE else number if number >= 0 else BITS - number
        if not 0 <= num_changed <= num_words:
            raise PublishError(f"the changes of {spec.name!r} are of {num_changed} words: it has {num_words}")
        if number == WHOLE:
            words_N.copy_(take(num_words * size).view(words_N.dtype))
        elif number > 0:
            counts_B = take(4 * _num_blocks(num_words)).view(torch.int32)
            if int(counts_B.min()) < 0 or int(counts_B.sum()) != num_changed:
                raise PublishError(f"the changes of {spec.name!r} have blocks of other numbers than {num_changed}")
            places_C = _places_in_all(counts_B, take(PLACE_BYTES * num_changed).view(torch.int16))
            if int(places_C.max()) >= num_words:
                raise PublishError(f"the changes of {spec.name!r} name a place that its {num_words} words do not have")
            words_N[places_C] = take(num_changed * size).view(words_N.dtype)
        elif number < 0:
            differs_N = unpack(take(-(-num_words // 8)), num_words)
            if int(differs_N.count_nonzero()) != num_changed:
                raise PublishError(f"the changes of {spec.name!r} have bits for other words than {num_changed}")
            words_N[differs_N] = take(num_changed * size).view(words_N.dtype)
        yield spec, tensors[spec.name]
    if place != len(data):
        raise PublishError(f"the changes of the weights have {len(data)} bytes: expected {place}")


def pack(bits_N: torch.Tensor) -> torch.Tensor:
    """Eight bits in a byte, uint8 [ceil(N / 8)]."""
    if bits_N.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits_N.numpy(), bitorder="little"))
    padding = -bits_N.numel() % 8
    whole = torch.cat([bits_N, bits_N.new_zeros(padding)]) if padding else bits_N
    columns = whole.view(torch.uint8).view(-1, 8)
    packed = columns[:, 0].clone()
    for place in range(1, 8):
        packed |= columns[:, place] << place
    return packed


def unpack(packed: torch.Tensor, number: int) -> torch.Tensor:
    """The first bits, bool [number]."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=number, bitorder="little").view(np.bool_))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:number].bool()


def _padded(data: torch.Tensor) -> torch.Tensor:
    padding = -data.numel() % 4
    return torch.cat([data, data.new_zeros(padding)]) if padding else data
