"""Which rollout a worker process is running at this moment: a word of shared memory that it writes and we read.

It survives the process, so that one that exits or crashes shows whose code did it; and it can be read while the process
answers nothing, because some code does not let the interpreter go.
"""

import mmap
import os
import tempfile
from types import TracebackType

SIZE_BYTES = 16


class Mark:
    """The number of the running rollout, 0 for none, and a count of all steps; shared by the file descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE_BYTES)
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def make(cls) -> "tuple[Mark, int]":
        """A new mark, and the file descriptor to pass to the process."""
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE_BYTES)
            return cls(file.fileno()), os.dup(file.fileno())

    def read(self) -> tuple[int, int]:
        """The running rollout and the number of steps so far."""
        return self._words[0], self._words[1]

    def step(self, number: int) -> "Step":
        """A context in which rollout `number` runs."""
        return Step(self._words, number)


class Step:
    def __init__(self, words: "memoryview[int]", number: int) -> None:
        self._words = words
        self._number = number

    def __enter__(self) -> None:
        self._words[0] = self._number
        self._words[1] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._words[0] = 0
