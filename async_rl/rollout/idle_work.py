"""What the inference pool does while the trainer finishes a batch whose rollouts are done; called by `producer`."""

from typing import Protocol

from async_rl.types import WeightVersion


class IdleWork(Protocol):
    """Work for an idle pool. Both methods run on the producer's event loop."""

    @property
    def max_delay_s(self) -> float:
        """How long `stop` may wait for what is under way before it cancels it."""
        ...

    async def run(self, iteration: int, version: WeightVersion) -> None:
        """Works with the weights in training, until it is done or told to stop.

        Called once per batch, when the last of its groups is finished. What fails is its own affair: it does not end
        the run.
        """
        ...

    async def stop(self) -> None:
        """Ends the work within a bounded time; when this returns, nothing of it is under way at any instance.

        Called before the next publish, also if `run` was never called.
        """
        ...
