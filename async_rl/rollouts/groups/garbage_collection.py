"""When Python may look for unreachable cycles among all objects; for `producer`.

The rollouts of a batch are some hundred thousand objects, and a full collection stops all of them for a third of a
second; with 65,536 short responses collections took a quarter of all processor time. So there is no full one while a
batch is rolled out, and one after its end, when the objects are gone. Younger objects are looked at less often than by
default: hardly any of them are cycles.
"""

import gc

NEVER = 2**31 - 1
YOUNG = 20_000
"""New objects before the youngest are looked at."""


class Collections:
    """Of this process: held back from the first `hold` to the last `make_up`, each of which makes one."""

    def __init__(self) -> None:
        self._num_holds = 0
        self._threshold = gc.get_threshold()

    def hold(self) -> None:
        if self._num_holds == 0:
            self._threshold = gc.get_threshold()
            gc.set_threshold(YOUNG, self._threshold[1], NEVER)
        self._num_holds += 1

    def make_up(self) -> None:
        self._num_holds -= 1
        if self._num_holds == 0:
            gc.set_threshold(*self._threshold)
        # Also if the next batch has begun: short iterations may leave no time between them.
        gc.collect()


COLLECTIONS = Collections()
