"""A batch that is rolled out: a coroutine per prompt generates and scores a group, which the dock gives to a replica.

The first failure of any of them cancels the others, and is sent to every replica at once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from async_rl.errors import AsyncRLError, RolloutLost
from async_rl.method.group_codec import pack
from async_rl.method.types import Batch, Group, GroupKey, WeightVersion
from async_rl.producer.cutting import num_tokens
from async_rl.producer.dock import Docking
from async_rl.producer.frames import NO_PROMPT, Message, error_as_data
from async_rl.rollouts.groups.garbage_collection import COLLECTIONS
from async_rl.rollouts.groups.group_maker import GroupMaker
from async_rl.rollouts.groups.idle_work import IdleWork

log = logging.getLogger(__name__)

Parts = tuple[Message, list[memoryview]]
"""A message, and the bytes that belong to it."""

MAKE_UP_S = 0.1
"""From the end of a batch to the collection of garbage that was held back."""

STARTS_AT_ONCE = 8
"""Rollouts that begin in one round of the event loop, which has other things to do besides."""

FRAME_TOKENS = 2**18
FRAME_RESPONSES = 2**8
"""Groups share a frame until they have so many tokens or responses: small ones cost less together, and packing them all
would take as long as the loop may be at work on one thing."""


class BatchRollout:
    """Begins to roll out the whole batch when it is made, on the running loop.

    Args:
        idle_work: gets the pool when the rollouts have finished.
        on_group: gets each group that finished.
        on_figures: gets those of the rollouts when all have finished, if there are any.
        rest: has the instances leave their devices to the trainer, after the idle work and before any group is trained.
    """

    pack = staticmethod(pack)

    def __init__(
        self,
        maker: GroupMaker,
        mini_batches: Sequence[Batch],
        version: WeightVersion,
        docking: Docking,
        idle_work: IdleWork | None = None,
        on_group: Callable[[Group], object] = lambda group: None,
        on_figures: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        *,
        rest: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._maker = maker
        self._rest = rest
        self._batch = Batch.union(mini_batches)
        self._version = version
        self._idle_work = idle_work
        self._on_group = on_group
        self._on_figures = on_figures
        self._given: list[asyncio.Queue[Group | Message]] = [asyncio.Queue() for _ in range(docking.num_replicas)]
        self._docks = docking.docks(mini_batches, self._give)
        self._held: list[Group] | None = [] if docking.holds else None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._hurry = asyncio.Event()
        self._is_settled = False
        """Whether all rollouts have ended as they should, a failure was sent, or the batch was left."""
        COLLECTIONS.hold()
        self._task = asyncio.create_task(self._run(), name=f"rollouts of iteration {self._batch.iteration}")
        self._task.add_done_callback(lambda _: self._require_settled())

    @property
    def iteration(self) -> int:
        return self._batch.iteration

    async def messages(self, replica: int) -> AsyncIterator[Parts]:
        """What a replica is sent: groups and the ends of mini-batches; a failure is the last."""
        given = self._given[replica]
        while True:
            groups: list[Group] = []
            responses_left, tokens_left = FRAME_RESPONSES, FRAME_TOKENS
            arrived = await given.get()
            # Those that finish at the same time share a frame.
            await asyncio.sleep(0)
            with suppress(asyncio.QueueEmpty):
                while isinstance(arrived, Group):
                    if arrived.index not in self._cancelled:
                        groups.append(arrived)
                        responses_left -= len(arrived.responses)
                        tokens_left -= num_tokens(arrived)
                    if responses_left <= 0 or tokens_left <= 0:
                        break
                    arrived = given.get_nowait()
            if groups:
                headers, tokens, logprobs, routes = self.pack(groups)
                parts = [array.data.cast("B") for array in (tokens, logprobs, routes) if array.nbytes]
                message = {"groups": headers, "bytes": [tokens.nbytes, logprobs.nbytes, routes.nbytes]}
                yield message, parts
            if not isinstance(arrived, Group):
                yield arrived, []
                if "failed" in arrived:
                    return

    def begin(self, replica: int, keys: Sequence[GroupKey]) -> None:
        """A replica trains these groups now; without any it waits."""
        self._docks[replica % len(self._docks)].begin(replica, keys)

    def cancel(self, replica: int, indices: Collection[int]) -> None:
        """Ends the rollouts of these groups of a replica's share; does not wait for that."""
        self._cancelled |= set(indices)
        for index in indices:
            if index in self._tasks:
                self._tasks[index].cancel()
        self._docks[replica % len(self._docks)].cancel(indices)

    def hurry(self) -> None:
        """Ends the wait of `leave`."""
        self._hurry.set()

    async def leave(self, *, waits: bool) -> None:
        """Ends what is left; with `waits` after the work of the idle pool."""
        if waits and self._idle_work is not None:
            self._idle_work.note_awaited()
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait({self._task, hurry}, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        if self._idle_work is not None:
            await self._idle_work.stop()
        self._is_settled = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        # Then whoever leaves has his answer, and the batch's objects are gone.
        asyncio.get_running_loop().call_later(MAKE_UP_S, COLLECTIONS.make_up)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as siblings:
            for number, index in enumerate(self._batch.prompts):
                if index in self._cancelled:
                    continue
                self._tasks[index] = siblings.create_task(self._produce(index))
                if number % STARTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        if self._rest is None:
            self._release()
        self._report_figures()
        if self._idle_work is not None:
            try:
                await self._idle_work.run(self._batch.iteration, self._version)
            except Exception:
                # Training does not depend on it; no other code awaits this task.
                log.exception("the work of the idle pool failed in iteration %d", self._batch.iteration)
        if self._rest is not None:
            await self._rest()
            self._release()

    def _release(self) -> None:
        """All rollouts have ended as they should: what was held goes to the replicas."""
        self._is_settled = True
        self._put(*self._held or ())

    def _report_figures(self) -> None:
        if not (taken := self._maker.take_figures()):
            return
        figures = {"iteration": self.iteration, **taken}
        log.info("rollouts: %s", figures)
        try:
            self._on_figures(figures)
        except AsyncRLError as error:
            # The groups are complete: the figures alone are lost.
            log.error("the figures of the rollouts of iteration %d are not recorded: %s", self.iteration, error)

    async def _produce(self, index: int) -> None:
        iteration, prompt = self._batch.iteration, self._batch.prompts[index]
        try:
            group = await self._maker.group(iteration, index, prompt, self._version)
        except Exception as error:
            if index in self._cancelled:
                log.info("a rollout that was cancelled, index %d of its batch, failed: %s", index, error)
                return
            # The boundary: it is raised in the trainer, and the task group cancels the siblings.
            self._fail(error, index)
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
            self._fail(lost, index)
            raise lost from error
        self._on_group(group)
        if self._held is None:
            self._put(group)
        else:
            self._held.append(group)

    def _put(self, *groups: Group) -> None:
        for number, dock in enumerate(self._docks):
            if own := [group for group in groups if group.index % len(self._docks) == number]:
                dock.put(*own)

    def _give(self, replica: int, item: Group | int) -> None:
        self._given[replica].put_nowait(item if isinstance(item, Group) else {"complete": item})

    def _fail(self, error: BaseException, index: int = NO_PROMPT) -> None:
        self._is_settled = True
        failure = {"failed": error_as_data(error), "index": index}
        for given in self._given:
            given.put_nowait(failure)

    def _require_settled(self) -> None:
        """That something beside the rollouts has ended them is a failure, too."""
        if not self._is_settled:
            self._fail(
                RolloutLost(
                    f"the rollouts of iteration {self.iteration} ended without all groups and without an error: "
                    "something beside them cancelled them; go on from the checkpoint with run.resume = true"
                )
            )


class BatchStarts:
    """The running batch of each iteration, which several replicas ask for: the first one starts it."""

    def __init__(self) -> None:
        self._batch: BatchRollout | None = None
        """The last one that was started."""
        self._failure: tuple[int, Exception] | None = None
        """The last iteration whose batch could not be started, and why."""
        self._started = asyncio.Condition()

    async def of(self, replica: int, iteration: int, start: Callable[[], Awaitable[BatchRollout]]) -> BatchRollout:
        """What `start` makes, which the first replica calls; the others wait for that. Raises in all what it raises."""
        async with self._started:
            if replica == 0:
                self._failure = None
                try:
                    self._batch = await start()
                except Exception as error:
                    self._failure = iteration, error
                self._started.notify_all()
            await self._started.wait_for(lambda: self._is_decided(iteration))
            if self._failure is not None and self._failure[0] == iteration:
                raise self._failure[1]
            assert self._batch is not None
            return self._batch

    def _is_decided(self, iteration: int) -> bool:
        if self._failure is not None and self._failure[0] == iteration:
            return True
        return self._batch is not None and self._batch.iteration == iteration
