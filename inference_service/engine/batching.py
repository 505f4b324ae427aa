"""transformers' continuous batching as the engine uses it: submit, cancel, hold between two steps, empty the caches.

One `ContinuousBatchingManager` runs the generation loop in its own thread. All methods here are called from the event
loop's thread, or (where they block) from the engine's control thread, never from both at once.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Listing
from contextlib import AbstractContextManager

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from inference_service.engine import ragged_attention
from inference_service.engine.cache_size import CacheSize
from inference_service.engine.sequences import Sequence
from inference_service.engine.token_sampler import TokenSampler
from inference_service.engine_interface import EngineFault, LogprobsMode


class FinishedRouter(OutputRouter):
    """Passes finished requests, all of one step at a time, to one callback, in the generation thread."""

    def __init__(self, on_outputs: Callable[[list[GenerationOutput]], None]) -> None:
        super().__init__()
        self._on_outputs = on_outputs

    def deliver(self, output: GenerationOutput) -> None:
        self._on_outputs([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self._on_outputs(outputs)


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
    ) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._ids: dict[Sequence, str] = {}
        self._counter = itertools.count()
        self._on_finished = on_finished
        self._page_size = size.page_size
        self._hold: AbstractContextManager[None] | None = None
        self._sampler = TokenSampler(self._sequences, mode, on_sampled, on_failed)
        config = ContinuousBatchingConfig(
            page_size=size.page_size,
            num_blocks=size.num_blocks,
            max_batch_tokens=size.max_batch_tokens,
            max_requests_per_batch=size.max_concurrency,
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._manager = ContinuousBatchingManager(model, greedy, config)  # type: ignore[arg-type]
        # The manager accepts only its own attention names, but requests a mask from the model only when it runs.
        model.set_attn_implementation(ragged_attention.NAME)
        self._manager.logit_processor = self._sampler
        self._manager.output_router = FinishedRouter(self._outputs)

    def start(self) -> None:
        self._manager.start()

    def stop(self, timeout_s: float) -> None:
        self.release()
        self._manager.stop(block=True, timeout=timeout_s, hard_stop=True)

    @property
    def fault(self) -> str | None:
        """Why the generation thread died, or None while it runs."""
        error = self._manager.background_thread_status.fatal_error
        return None if error is None else f"the generation thread died: {error!r}"

    @property
    def version(self) -> str:
        return self._sampler.version

    @version.setter
    def version(self, version: str) -> None:
        self._sampler.version = version

    @property
    def num_sampled(self) -> int:
        return self._sampler.num_sampled

    @property
    def cache_usage(self) -> float:
        """Share of the cache in use, including prefixes kept for later requests."""
        processor = self._manager.batch_processor
        return 0.0 if processor is None else 1.0 - float(processor.cache.compute_free_capacity())

    def submit(self, sequences: Listing[Sequence]) -> None:
        """Starts sequences of one prompt; new ones share one prefill of it.

        Raises:
            EngineFault: the generation thread has ended.
        """
        first = sequences[0]
        prompt = first.token_ids()
        # A shared prompt is computed up to its last token. If cached pages hold everything but that token, nothing is
        # left to compute, and transformers 5.23 would run the model on an empty step, which fails.
        if len(sequences) > 1 and len(prompt) % self._page_size == 1:
            for sequence in sequences:
                self.submit([sequence])
            return
        parent = f"{next(self._counter)}"
        ids = [parent, *(f"{parent}__child#{i}" for i in range(len(sequences) - 1))]
        for run_id, sequence in zip(ids, sequences, strict=True):
            self._sequences[run_id] = sequence
            self._ids[sequence] = run_id
        self._manager.num_return_sequences = len(sequences)
        accepted = self._manager.add_request(
            prompt,
            request_id=parent,
            max_new_tokens=first.remaining_tokens,
            eos_token_id=sorted(first.stop_ids),
        )
        if accepted is None:
            raise EngineFault(self.fault or "the engine is stopping")

    def cancel(self, sequences: Listing[Sequence]) -> None:
        """Drops sequences; tokens still generated for them are discarded. Unknown sequences are ignored."""
        # The first of a group is cancelled first: the other sequences are forked from it.
        for sequence in sequences:
            run_id = self._ids.pop(sequence, None)
            if run_id is not None:
                del self._sequences[run_id]
                self._manager.cancel_request(run_id)

    def hold(self) -> None:
        """Stops the loop between two steps; blocks until the running step has finished."""
        if self._hold is None:
            hold = self._manager.pause()
            hold.__enter__()
            self._hold = hold

    def release(self) -> None:
        """Lets the loop continue; running sequences continue where they stopped."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.__exit__(None, None, None)

    def empty_caches(self) -> None:
        """Drops all cached keys and values, including shared prefixes; running sequences will be computed again.

        Only while held. Sequences are submitted again, with their tokens so far as part of the prompt.
        """
        assert self._hold is not None, "the loop must stand still while its cache is emptied"
        running = list(self._sequences.values())
        # The loop may have taken a submission out of its queue just before it stopped, so a reset alone would miss
        # some.
        self.cancel(running)
        processor = self._manager.batch_processor
        assert processor is not None, "a held loop has a batch processor"
        processor.reset()
        processor.cache.reset()
        for sequence in running:
            self.submit([sequence])

    def _outputs(self, outputs: list[GenerationOutput]) -> None:
        known = [(self._sequences.get(output.request_id), output.error) for output in outputs]
        finished = [(sequence, error) for sequence, error in known if sequence is not None]
        if finished:
            self._on_finished(finished)

    def forget(self, sequence: Sequence) -> None:
        """Removes a finished sequence."""
        run_id = self._ids.pop(sequence, None)
        if run_id is not None:
            del self._sequences[run_id]
