"""Work for the inference pool while the trainer finishes a batch whose rollouts have finished; called by `producer`."""

from typing import Protocol

from async_rl.method.types import WeightVersion


class IdleWork(Protocol):
    """Work for an idle pool. Its methods run on the producer's event loop."""

    async def run(self, iteration: int, version: WeightVersion) -> None:
        """Works with the weights in training, until it has finished or `stop` is called.

        Called once per batch, when the last of its groups is finished. Its failures do not end the run.
        """
        ...

    def note_awaited(self) -> None:
        """The batch is trained: training waits for the work from now on, until it has finished."""
        ...

    async def stop(self) -> None:
        """Cancels what is left of the work; when this returns, none of its requests is running at any instance.

        Called before the next publish, also if `run` was never called.
        """
        ...
