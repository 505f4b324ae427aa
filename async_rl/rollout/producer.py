"""Rollouts: one coroutine per prompt generates a scored group and puts it into the queue, beside the training loop.

The coroutines run on the event loop's thread; the training loop takes the groups in order of completion. The first
failure of any of them cancels the others and is raised in the training loop at once.
"""

import asyncio
import concurrent.futures
import gc
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from async_rl.config.rollout_section import RolloutSection
from async_rl.data.prompts import Tokenizer
from async_rl.errors import AsyncRLError, InstanceRefused, PromptFailed, RolloutLost, WaitTimedOut
from async_rl.event_loop import EventLoopThread
from async_rl.pool.inference_pool import InferencePool
from async_rl.rewards import Reward
from async_rl.rollout.expected_length import ExpectedLength
from async_rl.rollout.garbage import FullCollections
from async_rl.rollout.idle_work import IdleWork
from async_rl.rollout.program_rollouts import ProgramRollouts
from async_rl.rollout.sample_queue import SampleQueue
from async_rl.rollout.sampling import single_turn_sampling, with_text
from async_rl.seeds import group_seed
from async_rl.types import Batch, Group, Prompt, WeightVersion

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""For starting the processes of a reward or a program, which have limits of their own: that of anything beyond."""

LEAVE_TIMEOUT_S = 30.0
"""For cancellation at the end of a batch: it closes connections, and calls no instance or reward."""

MAX_IDLE_WORK_S = 5400.0
"""The longest that training waits for the work of the idle pool: its other ranks wait two hours at most."""

WATCH_S = 0.5
"""How often a wait for that work looks whether the run has to end."""


class Producer:
    """Generates the rollouts of one data-parallel leader."""

    def __init__(
        self,
        pool: InferencePool,
        reward: Reward,
        loop: EventLoopThread,
        tokenizer: Tokenizer,
        rollout: RolloutSection,
        seed: int,
        idle_work: IdleWork | None = None,
        *,
        skip_special_tokens: bool = True,
        watch: Callable[[], None] = lambda: None,
        programs: ProgramRollouts | None = None,
        on_rollouts: Callable[[Mapping[str, Any]], None] = lambda figures: None,
    ) -> None:
        """Starts the reward and the rollout program, and waits for them.

        Args:
            idle_work: gets the pool when the rollouts of a batch have finished.
            skip_special_tokens: for decoding the responses.
            watch: called by the training loop while it waits for a group; an exception it raises ends the batch.
            programs: makes the groups; without it each rollout is a single turn, generated here.
            on_rollouts: gets the figures of the programs' rollouts of each batch, when the last one has finished.

        Raises:
            ConfigError: the reward or the program cannot be loaded.
        """
        self._pool = pool
        self._reward = reward
        self._loop = loop
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._seed = seed
        self.idle_work = idle_work
        self._expected_length = ExpectedLength(rollout.max_response_tokens)
        self._skip_special_tokens = skip_special_tokens
        self.watch = watch
        self._programs = programs
        self._on_rollouts = on_rollouts
        loop.run(reward.start(), START_TIMEOUT_S)
        if programs is not None:
            loop.run(programs.start(), START_TIMEOUT_S)
        # Collections of garbage stop all rollouts: what has been made until now stays, and is not looked at again.
        gc.freeze()

    @property
    def runs_programs(self) -> bool:
        """Whether rollouts are those of a program."""
        return self._programs is not None

    def start(self, batch: Batch, version: WeightVersion) -> "RolloutRun":
        """Dispatches the whole batch to the instances that serve `version`, and returns immediately."""
        return RolloutRun(self, self._loop, batch, version)

    def close(self) -> None:
        """Ends the processes of reward and program within `LEAVE_TIMEOUT_S` each, whatever these do."""
        if self._programs is not None:
            self._loop.end(self._programs.close(), LEAVE_TIMEOUT_S)
        self._loop.end(self._reward.close(), LEAVE_TIMEOUT_S)

    def note_finished(self, iteration: int) -> None:
        """All rollouts of a batch have finished: reports how those of programs went."""
        if self._programs is not None:
            figures = {"iteration": iteration, **self._programs.figures.take()}
            logger.info("rollouts: %s", figures)
            self._on_rollouts(figures)

    async def roll_out(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        """Generates the scored group of one prompt."""
        if self._programs is not None:
            return await self._programs.group(iteration, index, prompt, version)
        started_s = time.monotonic()
        sampling = single_turn_sampling(
            self._rollout,
            prompt,
            num_responses=self._rollout.responses_per_prompt,
            temperature=self._rollout.temperature,
            seed=group_seed(self._seed, iteration, index),
        )
        try:
            sampled, attempts = await self._pool.generate_group(
                prompt.token_ids, sampling, f"{version}-{index}", version, self._expected_length.of(prompt.prompt_id)
            )
        except InstanceRefused as error:
            error.add_note(f"asked for prompt {prompt.prompt_id}, index {index} of iteration {iteration}")
            raise
        except PromptFailed as error:
            raise PromptFailed(
                f"prompt {prompt.prompt_id!r}, index {index} of iteration {iteration}: {error}\n"
                "the instances stay in service: take the prompt out of the data, or repair what it meets there"
            ) from error
        self._expected_length.note(prompt.prompt_id, [len(response.token_ids) for response in sampled])
        responses = with_text(sampled, sampling.stop, self._decode)
        scores = await self._reward.score(prompt, responses)
        return Group(
            iteration=iteration,
            index=index,
            prompt=prompt,
            responses=responses,
            rewards=scores.rewards,
            reward_parts=scores.parts,
            reward_metrics=scores.metrics,
            weight_version=version,
            started_s=started_s,
            finished_s=time.monotonic(),
            attempts=attempts,
        )

    def _decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        return self._tokenizer.batch_decode(list(map(list, token_ids)), skip_special_tokens=self._skip_special_tokens)


class RolloutRun:
    """The running rollouts of one batch: a context manager that returns the groups in order of completion.

    Leaving it, normally or by an error, ends the rest: running requests are closed, and the instances abort them.
    """

    def __init__(self, producer: Producer, loop: EventLoopThread, batch: Batch, version: WeightVersion) -> None:
        self._producer = producer
        self._loop = loop
        self._batch = batch
        self._version = version
        self._queue = SampleQueue(len(batch.prompts), version, self._watch)
        self._full_collections = FullCollections()
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._task = loop.run(self._start())

    def __enter__(self) -> "RolloutRun":
        if self._producer.runs_programs:
            self._full_collections.hold()
        return self

    def ready(self, wait: bool) -> list[Group]:
        """See `SampleQueue.ready`."""
        return self._queue.ready(wait)

    def cancel(self, indices: Collection[int]) -> None:
        """See `FinishedGroups.cancel`; does not wait for the end of the rollouts, which the instances abort."""
        self._queue.cancel(indices)
        self._loop.submit(self._cancel(indices))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the work of the idle pool if the batch was trained, and for the end of the running rollouts.

        Raises:
            WaitTimedOut: they do not end, and nothing else is being raised.
        """
        self._queue.close()
        try:
            if error is None:
                self._let_idle_work_finish()
            self._loop.run(self._stop(), LEAVE_TIMEOUT_S)
        except WaitTimedOut as late:
            if error is None:
                raise
            logger.error("leaving the batch of iteration %d: %s", self._batch.iteration, late)
        finally:
            self._full_collections.make_up()

    def _let_idle_work_finish(self) -> None:
        """Waits for it as long as it may delay training. That the run has to end is raised by the next publish, after
        the iteration's record."""
        if (idle_work := self._producer.idle_work) is None:
            return
        waiting = self._loop.submit(self._until_finished(idle_work))
        try:
            while not concurrent.futures.wait([waiting], WATCH_S).done:
                self._watch()
        except AsyncRLError as ending:
            logger.warning("the work of the idle pool in iteration %d ends early: %s", self._batch.iteration, ending)
        finally:
            waiting.cancel()

    async def _until_finished(self, idle_work: IdleWork) -> None:
        idle_work.note_awaited()
        await asyncio.wait({self._task}, timeout=min(idle_work.max_delay_s, MAX_IDLE_WORK_S))

    def _watch(self) -> None:
        """Called while the training loop waits: checks the rollout thread, and calls the producer's own `watch`."""
        self._loop.require_alive()
        self._producer.watch()

    async def _start(self) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._run(), name=f"rollouts of iteration {self._batch.iteration}")
        # In all cases; after our own cancellation, which follows `close`, it has no effect.
        task.add_done_callback(lambda _: self._queue.end())
        return task

    async def _cancel(self, indices: Collection[int]) -> None:
        for index in indices:
            self._rollouts[index].cancel()

    async def _stop(self) -> None:
        if self._producer.idle_work is not None:
            await self._producer.idle_work.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as siblings:
            for index, prompt in self._batch.prompts.items():
                self._rollouts[index] = siblings.create_task(self._produce(index, prompt))
        try:
            self._producer.note_finished(self._batch.iteration)
        except AsyncRLError as error:
            # No other code awaits this task, and the groups are complete: the figures alone are lost.
            logger.error(
                "the figures of the rollouts of iteration %d are not recorded: %s", self._batch.iteration, error
            )
        if self._producer.idle_work is not None:
            try:
                await self._producer.idle_work.run(self._batch.iteration, self._version)
            except Exception:
                # Training does not depend on it; no other code awaits this task.
                logger.exception("the work of the idle pool failed in iteration %d", self._batch.iteration)

    async def _produce(self, index: int, prompt: Prompt) -> None:
        try:
            group = await self._producer.roll_out(self._batch.iteration, index, prompt, self._version)
            self._queue.put(group)
        except Exception as error:
            if self._queue.is_cancelled(index):
                logger.info("a rollout that was cancelled, index %d of its batch, failed: %s", index, error)
                return
            # The boundary of this thread: the queue passes the error to the training loop, the task group cancels the
            # siblings.
            self._queue.fail(error)
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # Cancelled from outside: the task group would treat it as success, and the rest would end the loop.
            lost = RolloutLost(
                f"the rollout of prompt {prompt.prompt_id}, index {index} of iteration {self._batch.iteration}, was "
                f"ended by {error!r} from beside"
            )
            self._queue.fail(lost)
            raise lost from error
