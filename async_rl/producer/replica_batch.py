"""One replica's share of a batch: a coroutine per prompt generates and scores a group, which is sent as it finishes.

The first failure of any of them cancels the others, and is sent at once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection

from async_rl.errors import RolloutLost
from async_rl.group_codec import pack
from async_rl.producer.frames import Message, error_as_data
from async_rl.rollout.idle_work import IdleWork
from async_rl.rollout.scored_rollouts import ScoredRollouts
from async_rl.types import Batch, Group, WeightVersion

log = logging.getLogger(__name__)

Parts = tuple[Message, list[memoryview]]
"""A message, and the bytes that belong to it."""


class ReplicaBatch:
    """Begins to roll out the whole share when it is made, on the running loop.

    Args:
        idle_work: gets the pool when the rollouts of this share have finished.
        on_group: gets each group that finished.
        on_finished: called when all have finished.
        with_texts: groups have texts and rows, which training needs none of.
    """

    def __init__(
        self,
        rollouts: ScoredRollouts,
        batch: Batch,
        version: WeightVersion,
        idle_work: IdleWork | None = None,
        on_group: Callable[[Group], object] = lambda group: None,
        on_finished: Callable[[], None] = lambda: None,
        *,
        with_texts: bool = False,
    ) -> None:
        self._rollouts = rollouts
        self._batch = batch
        self._version = version
        self._idle_work = idle_work
        self._on_group = on_group
        self._on_finished = on_finished
        self._with_texts = with_texts
        self._arrived: asyncio.Queue[Group | Message] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._hurry = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"rollouts of iteration {batch.iteration}")
        # In all cases; after the first end, or a failure, nothing is read any more.
        self._task.add_done_callback(lambda _: self._arrived.put_nowait({"ended": batch.iteration}))

    async def messages(self) -> AsyncIterator[Parts]:
        """What is sent: groups as they finish; a failure, or that all have ended, is the last."""
        while True:
            arrived = await self._arrived.get()
            if not isinstance(arrived, Group):
                yield arrived, []
                return
            if arrived.index not in self._cancelled:
                (header,), tokens, logprobs = pack([arrived], with_texts=self._with_texts)
                message = {"group": header, "token_bytes": tokens.nbytes}
                yield message, [tokens.data.cast("B"), logprobs.data.cast("B")]

    def cancel(self, indices: Collection[int]) -> None:
        """Ends the rollouts of these groups; does not wait for that."""
        self._cancelled |= set(indices)
        for index in indices:
            self._tasks[index].cancel()

    def hurry(self) -> None:
        """Ends the wait of `leave`."""
        self._hurry.set()

    async def leave(self, *, waits: bool) -> None:
        """Ends what is left; with `waits` after the work of the idle pool, as far as that may delay training."""
        if waits and self._idle_work is not None:
            self._idle_work.note_awaited()
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait(
                {self._task, hurry}, timeout=self._idle_work.max_delay_s, return_when=asyncio.FIRST_COMPLETED
            )
            hurry.cancel()
        if self._idle_work is not None:
            await self._idle_work.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as siblings:
            for index in self._batch.prompts:
                self._tasks[index] = siblings.create_task(self._produce(index))
        self._arrived.put_nowait({"ended": self._batch.iteration})
        self._on_finished()
        if self._idle_work is not None:
            try:
                await self._idle_work.run(self._batch.iteration, self._version)
            except Exception:
                # Training does not depend on it; no other code awaits this task.
                log.exception("the work of the idle pool failed in iteration %d", self._batch.iteration)

    async def _produce(self, index: int) -> None:
        iteration, prompt = self._batch.iteration, self._batch.prompts[index]
        try:
            group = await self._rollouts.roll_out(iteration, index, prompt, self._version)
        except Exception as error:
            if index in self._cancelled:
                log.info("a rollout that was cancelled, index %d of its batch, failed: %s", index, error)
                return
            # The boundary: it is raised in the trainer, and the task group cancels the siblings.
            self._arrived.put_nowait({"failed": error_as_data(error), "index": index})
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # Cancelled from outside: the task group would treat it as success, and the rest would end the loop.
            lost = RolloutLost(
                f"the rollout of prompt {prompt.prompt_id}, index {index} of iteration {iteration}, was ended by "
                f"{error!r} from beside"
            )
            self._arrived.put_nowait({"failed": error_as_data(lost), "index": index})
            raise lost from error
        self._on_group(group)
        self._arrived.put_nowait(group)
