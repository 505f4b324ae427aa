"""`response_logprobs` by the operations of `async_rl.cpu.exact`, for one rank that has the whole vocabulary.

Shape legend: R rows with logits, C rows of one chunk, H hidden size, V vocabulary, N response tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch

from async_rl.cpu import exact
from trainer.model.logprobs import CHUNK_BYTES


def exact_logprobs(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    label_rows_N: torch.Tensor,
    labels_N: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `trainer.model.logprobs.response_logprobs`; float32 throughout."""
    # `apply` is untyped in torch.
    made: tuple[torch.Tensor, torch.Tensor] = _ExactLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, label_rows_N, labels_N, temperature
    )
    return made


class _ExactLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        label_rows_N: torch.Tensor,
        labels_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        label_logits_N = hidden_RH.new_zeros(len(labels_N))
        normalizers, entropies = [], []
        for rows in _chunks(hidden_RH, weight_VH):
            logits_CV = exact.linear(hidden_RH[rows], weight_VH).div_(temperature)
            labels = _labels_of(label_rows_N, labels_N, rows)
            label_logits_N[labels.places] = logits_CV[labels.rows, labels.columns]
            highest_C1 = logits_CV.amax(dim=-1, keepdim=True)
            weights_CV = (logits_CV - highest_C1).exp_()
            masses_CB = exact.block_masses(weights_CV)
            normalizer_C1 = exact.log_normalizer(highest_C1, masses_CB)
            normalizers.append(normalizer_C1[:, 0])
            # sum p log p = sum p logit - normalizer.
            mean_C = weights_CV.mul_(logits_CV).sum(-1) / masses_CB.sum(-1).to(logits_CV.dtype)
            entropies.append(normalizer_C1[:, 0] - mean_C)
        normalizer_R, entropy_R = torch.cat(normalizers), torch.cat(entropies)
        ctx.save_for_backward(hidden_RH, weight_VH, label_rows_N, labels_N, normalizer_R)
        ctx.temperature = temperature
        entropy_N = entropy_R[label_rows_N]
        ctx.mark_non_differentiable(entropy_N)
        return label_logits_N - normalizer_R[label_rows_N], entropy_N

    @staticmethod
    def backward(ctx: Any, dlogprobs_N: torch.Tensor, _: torch.Tensor) -> Any:
        """d logits = sum over a row's labels of d logprob (onehot(label) - softmax)."""
        hidden_RH, weight_VH, label_rows_N, labels_N, normalizer_R = ctx.saved_tensors
        sums_R = torch.zeros_like(normalizer_R).index_add_(0, label_rows_N, dlogprobs_N)
        dhidden_RH = torch.empty_like(hidden_RH)
        dweight_VH = torch.zeros_like(weight_VH)
        for rows in _chunks(hidden_RH, weight_VH):
            logits_CV = (hidden_RH[rows] @ weight_VH.T).div_(ctx.temperature)
            labels = _labels_of(label_rows_N, labels_N, rows)
            dlogits_CV = logits_CV.sub_(normalizer_R[rows, None]).exp_().mul_(-sums_R[rows, None])
            dlogits_CV.index_put_((labels.rows, labels.columns), dlogprobs_N[labels.places], accumulate=True)
            dlogits_CV.div_(ctx.temperature)
            torch.mm(dlogits_CV, weight_VH, out=dhidden_RH[rows])
            dweight_VH.addmm_(dlogits_CV.T, hidden_RH[rows])
        return dhidden_RH, dweight_VH, None, None, None


class _Labels:
    """The labels at some rows: their places among all labels, and their rows and columns in the chunk's logits."""

    def __init__(self, places: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        self.places, self.rows, self.columns = places, rows, columns


def _labels_of(label_rows_N: torch.Tensor, labels_N: torch.Tensor, rows: slice) -> _Labels:
    places = ((label_rows_N >= rows.start) & (label_rows_N < rows.stop)).nonzero()[:, 0]
    return _Labels(places, label_rows_N[places] - rows.start, labels_N[places])


def _chunks(hidden_RH: torch.Tensor, weight_VH: torch.Tensor) -> Iterator[slice]:
    num_rows = max(1, CHUNK_BYTES // (len(weight_VH) * hidden_RH.dtype.itemsize))
    for start in range(0, len(hidden_RH), num_rows):
        yield slice(start, min(start + num_rows, len(hidden_RH)))
