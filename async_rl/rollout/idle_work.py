"""Work for the inference pool while the trainer finishes a batch whose rollouts have finished; called by `producer`."""

from typing import Protocol

from async_rl.types import WeightVersion


class IdleWork(Protocol):
    """Work for an idle pool. Both methods run on the producer's event loop."""

    @property
    def max_delay_s(self) -> float:
        """How long `stop` may wait for running work before it cancels it."""
        ...

    async def run(self, iteration: int, version: WeightVersion) -> None:
        """Works with the weights in training, until it has finished or `stop` is called.

        Called once per batch, when the last of its groups is finished. Its failures do not end the run.
        """
        ...

    async def stop(self) -> None:
        """Ends the work within a bounded time; when this returns, none of its requests is running at any instance.

        Called before the next publish, also if `run` was never called.
        """
        ...
