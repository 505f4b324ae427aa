"""Continuous batching: a thread that runs the model step by step, on whatever sequences are there.

All methods are called from the event loop's thread, or (where they block) from the engine's control thread, never from
both at once.
"""

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Listing

import torch
from transformers import PreTrainedModel

from inference_service.engine.cache_size import CacheSize
from inference_service.engine.kernels import FASTEST, Kernels
from inference_service.engine.kv_store import KVStore
from inference_service.engine.sampling import sample_step, score_step
from inference_service.engine.schedule import Run, Schedule
from inference_service.engine.sequences import Sequence
from inference_service.engine.step import ModelStep
from inference_service.engine_interface import EngineFault, LogprobsMode

logger = logging.getLogger(__name__)


class Batching:
    """Runs sequences until they finish.

    `on_sampled` receives the sequences of one step, `on_finished` its (sequence, error) pairs, `on_failed` sequences
    whose logits were not finite; all are called in the generation thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: CacheSize,
        mode: LogprobsMode,
        on_sampled: Callable[[list[Sequence]], None],
        on_finished: Callable[[list[tuple[Sequence, str | None]]], None],
        on_failed: Callable[[list[Sequence]], None],
        kernels: Kernels = FASTEST,
    ) -> None:
        self.version = "default"
        self.num_sampled = 0
        self.fault: str | None = None
        """Why the generation thread died, or None while it runs."""
        self._mode = mode
        self._on_sampled = on_sampled
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._step = ModelStep(model, kernels)
        self._store = KVStore(
            size.num_layers,
            size.num_kv_heads,
            size.head_dim,
            size.dtype,
            model.device,
            size.max_tokens,
            kernels.width,
            self._step.routes.width,
            size.delta,
            size.state_tokens,
        )
        self._schedule = Schedule(self._store, size.max_concurrency, size.prefill_tokens, kernels.is_exact)
        self._live: set[Sequence] = set()
        """Those that were neither cancelled nor finished."""
        self._submitted: list[Sequence] = []
        self._changed = threading.Condition()
        self._hold = False
        self._stands_still = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    @property
    def has_routes(self) -> bool:
        """Whether the model has experts, and so routes to report."""
        return self._step.routes.shape is not None

    @property
    def cache_usage(self) -> float:
        """Share of the cache in use, including prompts kept for later requests."""
        return self._store.num_tokens / self._store.max_tokens

    @property
    def num_asked(self) -> int:
        """Prompt tokens of the sequences that were started."""
        return self._schedule.num_asked

    @property
    def num_known(self) -> int:
        """Those of them whose keys and values were there already, or were computed for another sequence."""
        return self._schedule.num_known

    def submit(self, sequences: Listing[Sequence]) -> None:
        """Starts sequences.

        Raises:
            EngineFault: the generation thread has ended.
        """
        with self._changed:
            if self._stopping or self.fault is not None:
                raise EngineFault(self.fault or "the engine is stopping")
            self._live.update(sequences)
            self._submitted += sequences
            self._changed.notify_all()

    def cancel(self, sequences: Listing[Sequence]) -> None:
        """Drops sequences; a token that is being computed for them is discarded. Unknown sequences are ignored."""
        with self._changed:
            self._live.difference_update(sequences)

    def hold(self) -> None:
        """Stops the loop between two steps; blocks until the running step has finished."""
        with self._changed:
            self._hold = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stands_still or not self._thread.is_alive())

    def release(self) -> None:
        """Lets the loop continue; running sequences continue where they stopped."""
        with self._changed:
            self._hold = False
            self._changed.notify_all()

    def empty_caches(self) -> None:
        """Drops all keys and values, including kept prompts; running sequences will be computed again.

        Only while held.
        """
        assert self._hold, "the loop must stand still while its cache is emptied"
        self._step.forget()
        self._schedule.restart()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._may_go_on():
                    self._one_step()
        # Whatever it is, requests must not wait for it.
        except BaseException as error:
            logger.exception("the generation thread died")
            with self._changed:
                self.fault = f"the generation thread died: {error!r}"
                self._stands_still = True
                self._changed.notify_all()
                abandoned = list(self._live)
            self._on_finished([(sequence, self.fault) for sequence in abandoned])

    def _may_go_on(self) -> bool:
        """Waits until there is something to compute; false at the end."""
        with self._changed:
            while True:
                if self._stopping:
                    return False
                if not self._hold:
                    self._stands_still = False
                    self._schedule.add(self._submitted)
                    self._submitted = []
                    self._schedule.keep(self._live)
                    if self._schedule.has_work:
                        return True
                else:
                    self._stands_still = True
                    self._changed.notify_all()
                self._changed.wait()

    def _one_step(self) -> None:
        work = self._schedule.next()
        drawing = self._step(work, self._store.generation)
        for fed, logits in drawing.scored:
            assert fed.scored is not None, "targets are those of a sequence"
            fed.scored.prompt_samples += score_step(logits, fed.targets, fed.scored, self.version)
        if not drawing.runs:
            return
        sequences = [run.sequence for run in drawing.runs]
        samples = sample_step(drawing.logits, sequences, self._mode, self.version)
        sampled: list[Sequence] = []
        failed: list[Sequence] = []
        ended: list[Run] = []
        with self._changed:
            for run, sample in zip(drawing.runs, samples, strict=True):
                sequence = run.sequence
                if sequence not in self._live:
                    continue
                # NaN is the only value that differs from itself.
                if sample.logprob != sample.logprob:
                    failed.append(sequence)
                    ended.append(run)
                    continue
                sequence.samples.append(sample)
                sampled.append(sequence)
                if sequence.natural_end is not None:
                    if sequence.params.routed_experts:
                        sequence.routes = self._step.routes.of(run)
                    ended.append(run)
            self._live.difference_update(run.sequence for run in ended)
        self.num_sampled += len(sampled)
        for run in ended:
            self._schedule.finish(run)
        self._on_sampled(sampled)
        if failed:
            # Keys and values that are not finite would damage those who get their slots.
            self._schedule.restart()
            self._on_failed(failed)
        if finished := [run.sequence for run in ended if run.sequence not in failed]:
            self._on_finished([(sequence, None) for sequence in finished])
