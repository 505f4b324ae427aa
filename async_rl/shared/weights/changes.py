"""What changed of a stream of weights since the last one, in fewer bytes: exact, and checked as a whole stream is.

At small learning rates most bfloat16 weights round to what they were. A sender keeps the bytes that it sent last, and
sends of each tensor the words (2 or 4 bytes, 1 of one-byte dtypes) that differ: with their places, with one bit for
each word, or the whole tensor, whichever is least. A receiver writes them over what it has. Both hash the whole tensors
afterwards (`fingerprint.py`), so a receiver that had something else is found.

In front is an int32 for each tensor: `num_changed`, or `WHOLE`, or `BITS - num_changed`. Then come, tensor by tensor,
in parts that are padded to 4 bytes: places as int32 and words; or bits, the first in the lowest one, and words; or all.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from async_rl.errors import PublishError
from async_rl.shared.weights.fingerprint import TensorSpec

WHOLE, BITS = -1, -2

WORTH = 0.5
"""Of the bytes of all: where changes have more, all are sent."""

_WORDS = {1: torch.uint8, 2: torch.int16}
PLACE_BYTES = 4
MOST_WORDS = 2**31 - 1
"""Of a tensor of which places are sent."""


class LastSent:
    """The bytes of the last stream, and its fingerprint; None if there is none, or it was not sent completely."""

    def __init__(self) -> None:
        self.fingerprint: str | None = None
        self._bytes: dict[TensorSpec, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() for each in self._bytes.values())

    def keep(self, spec: TensorSpec, data: torch.Tensor) -> None:
        """`data` are the bytes of the tensor as they are sent now, uint8 [num_bytes]."""
        kept = self._bytes.get(spec)
        if kept is None:
            self._bytes[spec] = data.clone()
        else:
            kept.copy_(data)

    def replace(self, spec: TensorSpec, data: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """Keeps `data`, and returns what changed: the number for the front, and parts, each uint8 [its bytes].

        A part may be what is kept, and is right until the tensor is replaced again.
        """
        before = self._bytes.get(spec)
        changed = (WHOLE, []) if before is None else encode(words_of(spec, before), words_of(spec, data))
        self.keep(spec, data)
        return changed if changed[0] != WHOLE else (WHOLE, [_padded(self._bytes[spec])])

    def tensors(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """The bytes that are kept, uint8 [num_bytes] each, in this order."""
        return ((spec, self._bytes[spec]) for spec in specs)


def words_of(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers [num_words] that are compared and sent as one each."""
    size = spec.dtype.itemsize
    return data.view(_WORDS.get(size, torch.int32 if size % 4 == 0 else torch.uint8))


def encode(before_N: torch.Tensor, now_N: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """See `LastSent.replace`; without parts where all are sent."""
    differs_N = before_N != now_N
    num_words, size = now_N.numel(), now_N.element_size()
    num_changed = int(differs_N.count_nonzero())
    by_places = num_changed * (PLACE_BYTES + size) if num_words <= MOST_WORDS else num_words * size
    by_bits = -(-num_words // 8) + num_changed * size
    if min(by_places, by_bits) >= num_words * size or num_changed > MOST_WORDS + BITS:
        return WHOLE, []
    if by_places <= by_bits:
        places_C = differs_N.nonzero().view(-1)
        return num_changed, [places_C.to(torch.int32).view(torch.uint8), _padded(now_N[places_C].view(torch.uint8))]
    return BITS - num_changed, [_padded(pack(differs_N)), _padded(now_N[differs_N].view(torch.uint8))]


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
        elif number >= 0:
            places_C = take(PLACE_BYTES * num_changed).view(torch.int32).long()
            if num_changed and not 0 <= int(places_C.min()) <= int(places_C.max()) < num_words:
                raise PublishError(f"the changes of {spec.name!r} name a place that its {num_words} words do not have")
            words_N[places_C] = take(num_changed * size).view(words_N.dtype)
        else:
            differs_N = unpack(take(-(-num_words // 8)), num_words)
            if int(differs_N.count_nonzero()) != num_changed:
                raise PublishError(f"the changes of {spec.name!r} have bits for other words than {num_changed}")
            words_N[differs_N] = take(num_changed * size).view(words_N.dtype)
        yield spec, tensors[spec.name]
    if place != len(data):
        raise PublishError(f"the changes of the weights have {len(data)} bytes: expected {place}")


def pack(bits_N: torch.Tensor) -> torch.Tensor:
    """Eight bits in a byte, uint8 [ceil(N / 8)]."""
    padding = -bits_N.numel() % 8
    whole = torch.cat([bits_N, bits_N.new_zeros(padding)]) if padding else bits_N
    columns = whole.view(torch.uint8).view(-1, 8)
    packed = columns[:, 0].clone()
    for place in range(1, 8):
        packed |= columns[:, place] << place
    return packed


def unpack(packed: torch.Tensor, number: int) -> torch.Tensor:
    """The first bits, bool [number]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:number].bool()


def _padded(data: torch.Tensor) -> torch.Tensor:
    padding = -data.numel() % 4
    return torch.cat([data, data.new_zeros(padding)]) if padding else data
