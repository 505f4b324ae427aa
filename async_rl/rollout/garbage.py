"""When Python may look for unreachable cycles among all objects; for `producer`.

A thousand rollouts of programs in progress are some hundred thousand objects, and a full collection stops them all, and
the trainer, for a third of a second. So there is none while a batch is rolled out, and one at its end, when the objects
are gone. Younger objects are collected as ever.
"""

import gc

NEVER = 2**31 - 1


class FullCollections:
    """Holds full collections back from the first `hold` to `make_up`, which may be called without it."""

    def __init__(self) -> None:
        self._threshold: tuple[int, int, int] | None = None

    def hold(self) -> None:
        if self._threshold is None:
            self._threshold = gc.get_threshold()
            gc.set_threshold(*self._threshold[:2], NEVER)

    def make_up(self) -> None:
        if self._threshold is not None:
            gc.set_threshold(*self._threshold)
            self._threshold = None
            gc.collect()
