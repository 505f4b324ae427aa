"""Our sampling inside transformers' continuous batching; written against transformers 5.23.

Continuous batching samples with one random stream for the whole batch and has no per-request seeds, stop-token masks or
ranks. But it passes the requests of a step to a list of logits processors, which may change their logits. So this list
chooses the tokens itself, appends them to our sequences, and leaves only the chosen token for the argmax.
"""

from collections.abc import Callable, Mapping

import torch
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import FutureRequestState

from inference_service.engine.sampling import sample_step
from inference_service.engine.sequences import Sequence
from inference_service.engine_interface import LogprobsMode


class TokenSampler(ContinuousBatchingLogitsProcessorList):
    """Called by the generation thread: `prepare_tensor_args`, then `__call__`, once per step each.

    `sequences` maps the manager's request ids to our sequences; a request that is no longer in it was cancelled, and
    its tokens are discarded. `version` is stored with every token. `on_sampled` receives the sequences with a new
    token, `on_failed` those whose logits are not finite.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence],
        mode: LogprobsMode,
        on_sampled: Callable[[list[Sequence]], None],
        on_failed: Callable[[list[Sequence]], None],
    ) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.version = "default"
        self.num_sampled = 0
        self._sequences = sequences
        self._mode = mode
        self._on_sampled = on_sampled
        self._on_failed = on_failed
        self._rows: list[Sequence | None] = []

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        self._rows = [self._sequences.get(r.state.request_id) for r in requests_in_batch if r.has_new_token]
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        """`scores` is [rows, V] float32, the rows with a new token first; returns it with the chosen ones at +inf."""
        live = [(r, sequence) for r, sequence in enumerate(self._rows) if sequence is not None]
        if not live:
            return scores
        index = [r for r, _ in live]
        rows = [sequence for _, sequence in live]
        logits = scores[: len(rows)] if len(rows) == len(self._rows) else scores[index]
        samples = sample_step(logits, rows, self._mode, self.version)
        failed = []
        for sequence, sample in zip(rows, samples, strict=True):
            # NaN is the only value that differs from itself.
            if sample.logprob != sample.logprob:
                failed.append(sequence)
            else:
                sequence.samples.append(sample)
        self.num_sampled += len(rows) - len(failed)
        self._on_sampled(rows)
        if failed:
            self._on_failed(failed)
        scores[index, [sample.token_id for sample in samples]] = torch.inf
        return scores
