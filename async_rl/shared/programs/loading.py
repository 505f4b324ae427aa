"""How a program loads its libraries; for the entry points of trainer and instance."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Imports in its body are not interrupted by garbage collections, which took a fifth of their time.

    What is alive at its end, modules and their tables mostly, lives as long as the process: no later collection looks
    through it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
