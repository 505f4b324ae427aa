"""Log-probabilities of response tokens from hidden rows, and facts of the distributions they were drawn from.

Logits are computed in chunks of rows, in forward and again in backward, so that they are never all in memory at once.
If there is a single chunk, its probabilities are kept for backward, which takes as much memory as computing them again.
Each tensor-parallel rank has some rows of the output weights, and so a part of the vocabulary; the softmax is over the
whole vocabulary.

Shape legend: R rows with logits, C rows of one chunk, H hidden size, V vocabulary of this rank, N response tokens,
J judged rows, K other temperatures (`proof.draws.POWERS`).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from async_rl.method.proof.draws import POWERS
from trainer.batching.shared_prompt import Judged, Labels
from trainer.devices.layer_ops import DEFAULT_OPS, LayerOps

Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

CHUNK_BYTES = 256 * 2**20
"""Maximum size of one chunk's logits; three more tensors of that size exist at the same time."""

LEAST_LOGPROB = -1e4
"""exp of it is 0 in every dtype, and times 0 it is 0, as -inf is not."""


def response_logprobs(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    label_rows_N: torch.Tensor,
    labels_N: torch.Tensor,
    temperature: float,
    with_entropy: bool = True,
    ops: LayerOps = DEFAULT_OPS,
    judged: Judged | None = None,
    logits_scaling: float = 1.0,
) -> Scores:
    """(log softmax(logits / temperature) of each label at its row; the entropy of the whole row): [N] each; and how
    much likelier the label is at another temperature, log p^c / sum p^c - log p for each c of `POWERS`, [K, N], NaN for
    labels that are not judged.

    The first two have a gradient; that of the entropy costs nothing until it is used, and then the logits once more.
    float32, or float64 if the hidden rows are; the products with the weights are in the weights' dtype. One row may
    have several labels (a prompt's last row has the first token of every response), so the softmax is computed once per
    row. The entropy, two more passes over the logits, and the third, a few over the judged rows', are None without
    `with_entropy`, the third also without `judged`. The gradient of the hidden rows covers this rank's part of the
    vocabulary; the caller sums over ranks.

    Args:
        ops: `matmul` computes all products, `log_normalizer` the log-sum-exps.
        logits_scaling: what the model itself divides its logits by, ahead of the temperature.
    """
    # `apply` is untyped in torch.
    made: Scores = _ResponseLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, label_rows_N, labels_N, temperature, with_entropy, ops, judged, logits_scaling
    )
    return made


class _ResponseLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        label_rows_N: torch.Tensor,
        labels_N: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        ops: LayerOps,
        judged: Judged | None,
        logits_scaling: float,
    ) -> Scores:
        divisors = (logits_scaling, temperature)
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        first_label = group.rank() * len(weight_VH) if group is not None else 0
        own_labels_N = labels_N - first_label
        label_logits_N = hidden_RH.new_zeros(len(labels_N), dtype=_wide(hidden_RH.dtype))
        lses, entropies, sums = [], [], []
        chunks = list(_chunks(hidden_RH, weight_VH))
        for rows in chunks:
            logits_CV = _logits(hidden_RH[rows], weight_VH, divisors, ops)
            places_N, is_here_N = _label_places(label_rows_N, own_labels_N, rows, logits_CV)
            # Not times 0: another row of the chunk may hold a NaN.
            label_logits_N += logits_CV.view(-1).index_select(0, places_N).masked_fill_(~is_here_N, 0.0)
            lse_C1 = ops.log_normalizer(logits_CV)
            lses.append(lse_C1[:, 0])
            if with_entropy:
                logprobs_CV = logits_CV.sub_(lse_C1)
                probs_CV = logprobs_CV.exp()
                if judged is not None:
                    first, end = (bisect_left(judged.rows, bound) for bound in (rows.start, rows.stop))
                    sums.append(_power_sums(probs_CV.index_select(0, judged.rows_J[first:end] - rows.start)))
                entropies.append(-logprobs_CV.mul_(probs_CV).sum(-1))
        entropies_R = torch.cat(entropies) if with_entropy else None
        sums_KJ = torch.cat(sums, 1) if sums else None
        rows_J = judged.rows_J if judged is not None else None
        lse_R, entropy_R, sums_KJ = _over_ranks(torch.cat(lses), entropies_R, sums_KJ, rows_J, label_logits_N, group)
        # With one rank they are those of the whole vocabulary.
        is_whole = len(chunks) == 1 and (group is None or group.size() == 1)
        ctx.probs_RV = probs_CV if with_entropy and is_whole and ctx.needs_input_grad[0] else None
        ctx.save_for_backward(hidden_RH, weight_VH, label_rows_N, own_labels_N, lse_R, None)
        ctx.divisors, ctx.ops = divisors, ops
        # The entropy's is None, not zeros, unless a loss has it.
        ctx.set_materialize_grads(False)
        logprobs_N = label_logits_N - lse_R[label_rows_N]
        if entropy_R is None:
            return logprobs_N, None, None
        ctx.save_for_backward(hidden_RH, weight_VH, label_rows_N, own_labels_N, lse_R, entropy_R)
        if judged is None or sums_KJ is None:
            return logprobs_N, entropy_R[label_rows_N], None
        # The last one is that of labels that are not judged.
        log_sums_KJ = torch.cat([sums_KJ.log(), sums_KJ.new_full((len(POWERS), 1), torch.nan)], 1)
        log_ratios_KN = torch.stack([(power - 1) * logprobs_N for power in POWERS]) - log_sums_KJ[:, judged.index_N]
        ctx.mark_non_differentiable(log_ratios_KN)
        return logprobs_N, entropy_R[label_rows_N], log_ratios_KN

    @staticmethod
    def backward(ctx: Any, dlogprobs_N: torch.Tensor | None, dentropy_N: torch.Tensor | None, _: None) -> Any:
        """d logits = sum over a row's labels of dlogprob (onehot(label) - softmax) - dentropy softmax (logprob + H)."""
        hidden_RH, weight_VH, label_rows_N, own_labels_N, lse_R, entropy_R = ctx.saved_tensors
        if dlogprobs_N is None:
            dlogprobs_N = torch.zeros_like(label_rows_N, dtype=lse_R.dtype)
        temperature = math.prod(ctx.divisors)
        dlogits_N = dlogprobs_N / temperature
        sums_R = torch.zeros_like(lse_R).index_add_(0, label_rows_N, dlogits_N)
        # Written to below. The entropy's gradient has the logarithm of probabilities, which may have become 0.
        probs_RV, ctx.probs_RV = ctx.probs_RV if dentropy_N is None else None, None
        dentropy_R = None
        if dentropy_N is not None:
            dentropy_R = torch.zeros_like(lse_R).index_add_(0, label_rows_N, dentropy_N / temperature)
        dhidden, dweight_VH = [], None
        for rows in _chunks(hidden_RH, weight_VH):
            if probs_RV is None:
                logits_CV = _logits(hidden_RH[rows], weight_VH, ctx.divisors, ctx.ops)
                logprobs_CV = logits_CV.sub_(lse_R[rows, None])
                scale_CV = -sums_R[rows, None]
                if dentropy_R is not None:
                    # Probabilities that are 0 in floating point have no part in it.
                    surprise_CV = (logprobs_CV + entropy_R[rows, None]).clamp(min=LEAST_LOGPROB)
                    scale_CV = scale_CV - dentropy_R[rows, None] * surprise_CV
                dlogits_CV = logprobs_CV.exp_().mul_(scale_CV)
            else:
                dlogits_CV = probs_RV.mul_(-sums_R[rows, None])
            places_N, is_here_N = _label_places(label_rows_N, own_labels_N, rows, dlogits_CV)
            # Not `index_put_`, which sorts all labels on a device, in every chunk.
            dlogits_CV.view(-1).scatter_add_(0, places_N, dlogits_N * is_here_N)
            dscores_CV = dlogits_CV.to(weight_VH.dtype)
            dhidden.append(ctx.ops.matmul(dscores_CV, weight_VH))
            if not ctx.needs_input_grad[1]:
                continue
            part_VH = ctx.ops.matmul(dscores_CV.T, hidden_RH[rows])
            dweight_VH = part_VH.to(_wide(part_VH.dtype)) if dweight_VH is None else dweight_VH.add_(part_VH)
        dweight_VH = None if dweight_VH is None else dweight_VH.to(weight_VH.dtype)
        return torch.cat(dhidden), dweight_VH, None, None, None, None, None, None, None


def of_all_labels(of_own: Scores, labels: Labels, group: dist.ProcessGroup | None) -> Scores:
    """What each context-parallel rank has of its own labels as that of all labels of the micro-batch, on each of them.

    All ranks compute the same loss of it, so each takes its own part of the gradient: nothing is exchanged in backward.
    Waits for the ranks of `group`; without one all labels are this rank's.
    """
    if group is None or labels.places_N is None:
        return of_own
    # `apply` is untyped in torch.
    everything: Scores = _OfAllLabels.apply(*of_own, labels.places_N, labels.num_labels, group)  # type: ignore[no-untyped-call]
    return everything


class _OfAllLabels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first_N: torch.Tensor,
        entropy_N: torch.Tensor | None,
        log_ratios_KN: torch.Tensor | None,
        places_N: torch.Tensor,
        num_labels: int,
        group: dist.ProcessGroup,
    ) -> Scores:
        given = [first_N[None]] + [x if x.dim() == 2 else x[None] for x in (entropy_N, log_ratios_KN) if x is not None]
        own = torch.cat(given)
        # Every label is one rank's, and the others add 0 to it.
        everything = own.new_zeros(len(own), num_labels)
        everything[:, places_N] = own
        dist.all_reduce(everything, group=group)
        ctx.save_for_backward(places_N)
        ctx.set_materialize_grads(False)
        # Not views of one tensor, which a loss could not change in place.
        logprobs_N, *others = (row.clone() for row in everything)
        if log_ratios_KN is None:
            return logprobs_N, None if entropy_N is None else others[0], None
        all_ratios_KN = everything[2:].clone()
        ctx.mark_non_differentiable(all_ratios_KN)
        return logprobs_N, others[0], all_ratios_KN

    @staticmethod
    def backward(ctx: Any, dfirst: torch.Tensor | None, dentropy: torch.Tensor | None, _: None) -> Any:
        (places_N,) = ctx.saved_tensors
        own = (grad if grad is None else grad.index_select(0, places_N) for grad in (dfirst, dentropy))
        return *own, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(hidden_RH: torch.Tensor, weight_VH: torch.Tensor) -> Iterator[slice]:
    row_bytes = len(weight_VH) * _wide(hidden_RH.dtype).itemsize
    num_rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(hidden_RH), num_rows):
        yield slice(start, min(start + num_rows, len(hidden_RH)))


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, divisors: tuple[float, float], ops: LayerOps
) -> torch.Tensor:
    """This rank's logits over the divisors, one after the other, [C, V], a new tensor in float32 or float64."""
    logits_CV = ops.matmul(hidden_CH, weight_VH.T).to(_wide(hidden_CH.dtype))
    for divisor in divisors:
        logits_CV = logits_CV if divisor == 1.0 else logits_CV.div_(divisor)
    return logits_CV


def _label_places(
    label_rows_N: torch.Tensor, own_labels_N: torch.Tensor, rows: slice, logits_CV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each label is in a chunk's flattened logits, and whether it is there; if not, some place of the chunk.

    Selecting the labels that are in the chunk would synchronize with the device; additions of their zeros to one place
    would wait for each other.
    """
    num_rows, num_columns = logits_CV.shape
    row_N, column_N = label_rows_N - rows.start, own_labels_N
    is_here_N = (row_N >= 0) & (row_N < num_rows) & (column_N >= 0) & (column_N < num_columns)
    return row_N.remainder(num_rows) * num_columns + column_N.remainder(num_columns), is_here_N


def _power_sums(probs_CV: torch.Tensor) -> torch.Tensor:
    """sum p^c of each row for each c of `POWERS`, [K, C]; of square roots and products, which take less than powers."""
    assert POWERS == (7 / 8, 9 / 8)
    most_CV = probs_CV.sqrt()
    part_CV = most_CV.sqrt()
    most_CV *= part_CV  # p^(3/4)
    part_CV.sqrt_()  # p^(1/8)
    return torch.stack([torch.bmm(each_CV[:, None], part_CV[:, :, None])[:, 0, 0] for each_CV in (most_CV, probs_CV)])


def _over_ranks(
    lse_R: torch.Tensor,
    entropy_R: torch.Tensor | None,
    sums_KJ: torch.Tensor | None,
    rows_J: torch.Tensor | None,
    label_logits_N: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-sum-exp, any entropy, and any power sums of the rows J, over the whole vocabulary, from each rank's; sums
    `label_logits_N` in place.

    With a rank's share w_k = exp(lse_k - lse) of the probability, the entropy is sum_k w_k (entropy_k - log w_k), the
    sum of the powers c is sum_k w_k^c sum_k,c.
    """
    if group is None or group.size() == 1:
        return lse_R, entropy_R, sums_KJ
    highest_R = lse_R.clone()
    dist.all_reduce(highest_R, dist.ReduceOp.MAX, group)
    weight_R = (lse_R - highest_R).exp()
    weighted_R = lse_R[:0] if entropy_R is None else weight_R * (entropy_R - lse_R + highest_R)
    weighted_KJ = lse_R.new_empty(len(POWERS), 0)
    if sums_KJ is not None:
        weighted_KJ = sums_KJ * torch.stack([weight_R[rows_J] ** power for power in POWERS])
    sums = torch.cat([weight_R, weighted_R, weighted_KJ.flatten(), label_logits_N])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    total_R, weighted_R, weighted, label_sums_N = sums.split(
        [len(lse_R), len(weighted_R), weighted_KJ.numel(), len(label_logits_N)]
    )
    label_logits_N.copy_(label_sums_N)
    if sums_KJ is not None:
        sums_KJ = weighted.view_as(sums_KJ) / torch.stack([total_R[rows_J] ** power for power in POWERS])
    entropy_R = None if entropy_R is None else weighted_R / total_R + total_R.log()
    return highest_R + total_R.log(), entropy_R, sums_KJ
