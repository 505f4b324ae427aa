"""A process that may open no file any more, as one with too many connections."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def room_for_files(num_left: int) -> Iterator[None]:
    """Lets this process open so many further files, and as many more as it closes meanwhile.

    The limit is one of numbers, not of a count: the free ones below the highest are taken until the end.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    taken: list[int] = []
    try:
        while not taken or taken[-1] < highest:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + num_left, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in taken:
            os.close(number)
