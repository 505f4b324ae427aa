"""Parts of an independent GRPO implementation on unshared samples, in transformers."""

import torch
from transformers import PreTrainedModel

from async_rl.types import Group, Response


def sample_distributions(model: PreTrainedModel, group: Group, response: Response, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each token of a response, [R, V], from prompt and response alone."""
    tokens = torch.tensor([[*group.prompt.token_ids, *response.token_ids]])
    logits: torch.Tensor = model(tokens, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1] / temperature
    return logits.log_softmax(1)


def expected_advantages(group: Group) -> list[float]:
    mean = sum(group.rewards) / len(group.rewards)
    if len(group.rewards) == 1:
        return [0.0]
    std = (sum((r - mean) ** 2 for r in group.rewards) / (len(group.rewards) - 1)) ** 0.5
    return [(r - mean) / (std + 1e-6) for r in group.rewards]
