"""Log-probabilities of response tokens from logits.

Shape legend: R rows with logits, V vocabulary, N response tokens.
"""

import torch


def response_logprobs(
    logits_RV: torch.Tensor, label_rows_N: torch.Tensor, labels_N: torch.Tensor, temperature: float
) -> torch.Tensor:
    """log softmax(logits / temperature) of each label at its row, float32 [N], with gradient.

    One row may serve several labels (the prompt's last row serves the first token of every response), so the softmax
    is taken once per row.
    """
    logits_RV = logits_RV.float()
    if temperature != 1.0:
        logits_RV = logits_RV / temperature
    return torch.log_softmax(logits_RV, dim=-1)[label_rows_N, labels_N]
