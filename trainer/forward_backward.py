"""Forward and backward passes of a model over the micro-batches of a window.

`PackedPass` runs whole micro-batches through Megatron's schedule: one after the other, or 1F1B in a pipeline, or the
interleaved one where its ranks have several chunks. `TwoStagePass` runs responses of one prompt that are too long for a
micro-batch. Both return, per micro-batch or micro-group, the log-probs of its sampled tokens on the last stage.

Shape legend: N sampled tokens of one micro-batch.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from async_rl.loop import Window
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import UNPROVEN, Group, Prompt, Response
from async_rl.shared.cpu.exact import ROW_MULTIPLE
from trainer.attention.prompt_cache import PromptCache
from trainer.batching.group_slice import GroupSlice, slices_of, split_slice
from trainer.batching.packing import pack_slices
from trainer.batching.shared_prompt import (
    MicroBatch,
    RowShare,
    last_prompt_row,
    make_micro_batch,
    make_micro_group,
    make_prompt_rows,
)
from trainer.model.gpt import RankModel
from trainer.model.pipeline_shapes import pipeline_arguments
from trainer.parallel import Parallel
from trainer.policy.tri_model import Frozen

LossOf = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(number of the micro-batch, log-probs [N], entropies [N], log-ratios [K, N]: see `response_logprobs`; or values [N],
None, None) -> its loss, a sum."""


class Pass(Protocol):
    @property
    def micro_batches(self) -> Sequence[MicroBatch]: ...

    def forward(self, model: RankModel, loss_of: LossOf) -> None:
        """Forward only, for a model without gradients. `loss_of` runs on the last stage."""
        ...

    def logprobs(self, model: RankModel) -> list[torch.Tensor]:
        """Log-probs of each micro-batch, [N] each; an empty list before the last pipeline stage."""
        ...

    def train(self, policy: DistributedDataParallel, loss_of: LossOf) -> None:
        """Forward and backward; adds gradients to the policy's buffers. `loss_of` runs on the last stage."""
        ...


def make_passes(window: Window, parallel: Parallel, temperature: float, max_tokens: int) -> list[Pass]:
    """The passes that run a window, whose micro-batches have at most `max_tokens` rows except for longer groups.

    The slices of a longer group are packed anew. Under pipeline parallelism, and where experts span replicas, a slice
    that is too long by itself is split into micro-groups that each hold the prompt: all ranks then run the same passes.
    Otherwise it runs in two stages, with its prompt computed once.

    Where experts span replicas, this is a collective of the replicas that share them: their ranks exchange tokens in
    every layer, so they agree on the largest number of passes, and the other replicas run empty ones. The interleaved
    schedule takes micro-batches in rounds of one for each stage: empty ones make the last round whole.
    """
    if parallel.pp_size > 1 or parallel.experts_span_replicas:
        planned = [slices for groups in window for slices in _fitting(groups, max_tokens, split=True)]
        (most,) = parallel.most_among_expert_peers(len(planned))
        if most == 0:
            return []
        rounds = parallel.pp_size if parallel.num_chunks > 1 else 1
        planned += [[]] * (most + -most % rounds - len(planned))
        return [PackedPass([_lay_out(slices, parallel) for slices in planned], temperature)]
    return [
        TwoStagePass(slices[0], parallel, temperature, max_tokens)
        if len(slices) == 1 and slices[0].num_rows > max_tokens
        else PackedPass([_lay_out(slices, parallel)], temperature)
        for groups in window
        for slices in _fitting(groups, max_tokens, split=False)
    ]


def by_gradient(window: Window, has_gradient: Callable[[Group], bool]) -> tuple[Window, Window]:
    """The groups that have a gradient and those that have none, in their original micro-batches.

    Micro-batches are not repacked, so that they depend on the order of training only, not on what was ready at what
    time.
    """
    parts = [
        [[group for group in groups if has_gradient(group) == wanted] for groups in window] for wanted in (True, False)
    ]
    with_gradient, without = ([groups for groups in part if groups] for part in parts)
    return with_gradient, without


def logprobs_of(
    model: Frozen | None, passes: Sequence[Pass], each: Callable[[Sequence[Pass]], Iterable[Pass]] = iter
) -> Sequence[list[torch.Tensor] | None]:
    """Log-probs (of a critic: values) of each pass's micro-batches under a frozen model; None for each without one.

    Args:
        each: hands out the passes one after the other.
    """
    if model is None:
        return [None] * len(passes)
    with model.resident() as resident:
        return [a_pass.logprobs(resident) for a_pass in each(passes)]


def unscored_group(prompt_token_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> Group:
    """Tokens as a group, the input of passes; its other fields are not read."""
    prompt = Prompt("probe", TokenIds(prompt_token_ids), {})
    rollouts = tuple(
        Response(
            token_ids=TokenIds(tokens),
            logprobs=Logprobs(),
            text="",
            finish_reason="length",
            weight_spans=(),
            instance="",
        )
        for tokens in responses
    )
    return Group(
        iteration=0,
        index=0,
        prompt=prompt,
        responses=rollouts,
        rewards=(0.0,) * len(rollouts),
        weight_version=UNPROVEN,
        started_s=0.0,
        finished_s=0.0,
    )


class PackedPass:
    """Whole micro-batches, through Megatron's schedule."""

    def __init__(self, micro_batches: Sequence[MicroBatch], temperature: float) -> None:
        self.micro_batches = micro_batches
        self._temperature = temperature

    def forward(self, model: RankModel, loss_of: LossOf) -> None:
        self._run(model, loss_of, forward_only=True)

    def logprobs(self, model: RankModel) -> list[torch.Tensor]:
        logprobs: list[torch.Tensor] = []

        def keep(number: int, logprobs_N: torch.Tensor, *_: None) -> torch.Tensor:
            logprobs.append(logprobs_N)
            return logprobs_N.sum()

        self._run(model, keep, forward_only=True, with_entropy=False)
        return logprobs

    def train(self, policy: DistributedDataParallel, loss_of: LossOf) -> None:
        self._run(policy.module, loss_of, forward_only=False)

    def _run(
        self,
        model: RankModel,
        loss_of: Callable[..., torch.Tensor],
        forward_only: bool,
        with_entropy: bool = True,
    ) -> None:
        chunks = list(model.chunks)
        # One iterator for each chunk: all of them read all micro-batches.
        data = [iter(enumerate(self.micro_batches)) for _ in chunks]

        def forward_step(numbered: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> Any:
            number, micro_batch = next(numbered)
            made = model(micro_batch, self._temperature, with_entropy)
            return made, functools.partial(_with_count, loss_of, number)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(self.micro_batches),
            # Not read: each micro-batch has its own number of rows.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            **pipeline_arguments(
                get_model_config(model), [batch.rows.segments.num_rows for batch in self.micro_batches]
            ),
        )


class TwoStagePass:
    """One long slice: its prompt once, then its responses in micro-groups, then the prompt's backward once."""

    def __init__(self, whole: GroupSlice, parallel: Parallel, temperature: float, max_tokens: int) -> None:
        device, share = parallel.device.DEVICE, _row_share(parallel)
        self._last_row, _ = last_prompt_row(len(whole.prompt), share)
        self._prompt_rows = make_prompt_rows(whole, device, share)
        self.micro_batches = [
            make_micro_group(part, device, share) for part in split_slice(whole, max_tokens, with_prompt=False)
        ]
        self._temperature = temperature

    def forward(self, model: RankModel, loss_of: LossOf) -> None:
        for number, outputs in enumerate(self._forward(model, PromptCache())):
            loss_of(number, *outputs)

    def logprobs(self, model: RankModel) -> list[torch.Tensor]:
        return [logprobs for logprobs, *_ in self._forward(model, PromptCache(), with_entropy=False)]

    def train(self, policy: DistributedDataParallel, loss_of: LossOf) -> None:
        cache = PromptCache()
        for number, outputs in enumerate(self._forward(policy.module, cache)):
            loss_of(number, *outputs).backward()
        cache.backward()

    def _forward(
        self, whole: RankModel, cache: PromptCache, with_entropy: bool = True
    ) -> Iterator[tuple[torch.Tensor, Any, Any]]:
        (model,) = whole.chunks
        prompt_TH = model.rows_for_logits(model.hidden(self._prompt_rows, cache))
        cache.begin_responses(prompt_TH[self._last_row : self._last_row + 1])
        for micro_group in self.micro_batches:
            rows_TH = model.rows_for_logits(model.hidden(micro_group.rows, cache))
            rows_RH = torch.cat([cache.last_row(), rows_TH])
            yield model.scores(rows_RH, micro_group.labels, self._temperature, with_entropy)


def _with_count(
    loss_of: Callable[..., torch.Tensor], number: int, outputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(loss, token count, report) for Megatron's schedule if losses are sums; tokens are counted elsewhere."""
    loss = loss_of(number, *outputs)
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}


def _lay_out(slices: Sequence[GroupSlice], parallel: Parallel) -> MicroBatch:
    return make_micro_batch(slices, parallel.device.DEVICE, _row_share(parallel))


def _row_share(parallel: Parallel) -> RowShare:
    if parallel.device.LAYER_OPS.exact:
        return RowShare(ROW_MULTIPLE)
    return RowShare(parallel.cp_size * parallel.tp_size, parallel.cp_rank, parallel.cp_size)


def _fitting(groups: Sequence[Group], max_tokens: int, split: bool) -> list[list[GroupSlice]]:
    """A micro-batch of the window as it is, or one long group in several, of at most `max_tokens` rows each.

    Without `split` a slice that is longer by itself is one of them.
    """
    slices = slices_of(groups)
    if len(groups) > 1 or sum(part.num_rows for part in slices) <= max_tokens:
        return [slices]
    if split:
        slices = [part for whole in slices for part in split_slice(whole, max_tokens, with_prompt=True)]
    return pack_slices(slices, max_tokens)
