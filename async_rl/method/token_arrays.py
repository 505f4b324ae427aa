"""Sequences of tokens and of their log-probs: immutable, four bytes for each value, no Python object until one is read.

They need no numpy, so that the processes of rewards and programs, which get responses too, start without it. Where
many values are computed with, `np.frombuffer(values.buffer, ...)` has them without a copy.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

T = TypeVar("T", int, float)

NUM_SHOWN = 32
"""Values in the `repr`."""


class _Values(Sequence[T], Generic[T]):
    """Compares equal to tuples and lists of the same values, and hashes like the tuple."""

    __slots__ = ("_array",)
    typecode: ClassVar[str]

    def __init__(self, values: "Iterable[T]" = ()) -> None:
        self._array: array[T] = array(self.typecode, values._array if isinstance(values, _Values) else values)

    @classmethod
    def joined(cls, parts: "Iterable[Self | array[T]]") -> Self:
        """The values of all parts, one after the other."""
        whole = cls()
        for part in parts:
            whole._array.extend(part._array if isinstance(part, _Values) else part)
        return whole

    @classmethod
    def of_bytes(cls, buffer: "bytes | memoryview | array[Any]") -> Self:
        """From values as they lie in memory; a copy."""
        whole, view = cls(), memoryview(buffer)
        if view.nbytes:
            whole._array.frombytes(view.cast("B"))
        return whole

    @property
    def buffer(self) -> memoryview:
        """The values as they lie in memory, read-only."""
        return memoryview(self._array).toreadonly()

    def tolist(self) -> list[T]:
        return self._array.tolist()

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> "T | Self":
        if isinstance(index, slice):
            return type(self)(self._array[index])
        return self._array[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._array)

    def __contains__(self, value: object) -> bool:
        return value in self._array

    def __add__(self, other: Iterable[T]) -> Self:
        return self.joined((self, type(self)(other)))

    def __radd__(self, other: Iterable[T]) -> Self:
        return self.joined((type(self)(other), self))

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self._array == other._array
        if isinstance(other, tuple | list):
            return len(self) == len(other) and tuple(self) == tuple(other)
        return NotImplemented

    def __lt__(self, other: Self) -> bool:
        return self._array < other._array

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self._array[:NUM_SHOWN]))
        return f"{type(self).__name__}(({shown}{', ...' if len(self) > NUM_SHOWN else ''}))"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._array,)


class TokenIds(_Values[int]):
    """Token ids, int32.

    Raises:
        OverflowError: one is outside int32.
    """

    __slots__ = ()
    typecode = "i"


class ExpertIds(_Values[int]):
    """Numbers of experts, uint16: which ones each row chose in each layer, `[rows, layers, k]` flat."""

    __slots__ = ()
    typecode = "H"


class Logprobs(_Values[float]):
    """Natural log-probabilities, float32, as engines compute them: JSON has all digits of one, so none is lost."""

    __slots__ = ()
    typecode = "f"
