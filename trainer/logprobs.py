"""Log-probabilities of response tokens from hidden rows, and the entropy of what they were drawn from.

Shape legend: R rows with logits, H hidden size, V vocabulary of this rank, N response tokens.
"""

import torch


def response_logprobs(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    label_rows_N: torch.Tensor,
    labels_N: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log softmax(logits / temperature) of each label at its row, with gradient; entropy there, without): [N] each.

    float32, or float64 where the hidden rows are. One row may serve several labels (a prompt's last row serves the first
    token of every response), so the softmax is taken once per row.
    """
    logits_RV = (hidden_RH @ weight_VH.T).to(torch.promote_types(hidden_RH.dtype, torch.float32)) / temperature
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1).detach()
    return logprobs_RV[label_rows_N, labels_N], entropy_R[label_rows_N]
