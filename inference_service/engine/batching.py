"""transformers' continuous batching as the engine uses it: submit, cancel, hold between two steps, empty the caches.

One `ContinuousBatchingManager` runs the generation loop in a thread of its own. All methods here are called from the
event loop's thread, or (where they block) from the engine's control thread, never from both at once.
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
    """Hands finished requests to one callback, in the generation thread, a step's worth at a time."""

    def __init__(self, on_outputs: Callable[[list[GenerationOutput]], None]) -> None:
        super().__init__()
        self._on_outputs = on_outputs

    def deliver(self, output: GenerationOutput) -> None:
        self._on_outputs([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self._on_outputs(outputs)


class Batching:
    """Runs sequences to their end.

    `on_sampled` gets the sequences of one step, `on_finished` (sequence, error) pairs of one, `on_failed` sequences
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
        # The manager accepts only its own attention names, but asks the model for a mask only when it runs.
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
        """Why the generation thread died, or None while it lives."""
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
        """Share of the cache that is taken, prefixes kept for later requests included."""
        processor = self._manager.batch_processor
        return 0.0 if processor is None else 1.0 - float(processor.cache.compute_free_capacity())

    def submit(self, sequences: Listing[Sequence]) -> None:
        """Starts sequences of one prompt; fresh ones share one prefill of it.

        Raises:
            EngineFault: the generation thread is gone.
        """
        first = sequences[0]
        prompt = first.token_ids()
        # A shared prompt is computed up to its last token. Where cached pages hold all of it but that one, nothing is
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
        """Drops sequences; tokens that are being made for them go nowhere. Unknown ones are ignored."""
        # The first of a group goes first: it is the one the others are forked from.
        for sequence in sequences:
            run_id = self._ids.pop(sequence, None)
            if run_id is not None:
                del self._sequences[run_id]
                self._manager.cancel_request(run_id)

    def hold(self) -> None:
        """Stops the loop between two steps; blocks for the step that is running."""
        if self._hold is None:
            hold = self._manager.pause()
            hold.__enter__()
            self._hold = hold

    def release(self) -> None:
        """Lets the loop go on; running sequences continue where they were."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.__exit__(None, None, None)

    def empty_caches(self) -> None:
        """Forgets every key and value, shared prefixes included; running sequences will be computed again.

        Only while held. Sequences are submitted anew, their tokens so far as part of the prompt.
        """
        assert self._hold is not None, "the loop must stand still while its cache is emptied"
        running = list(self._sequences.values())
        # The loop may have taken a submission out of its queue just before it stopped, so a reset does not reach all.
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
        """Drops a finished sequence from the books."""
        run_id = self._ids.pop(sequence, None)
        if run_id is not None:
            del self._sequences[run_id]
