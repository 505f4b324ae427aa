"""Parts of an independent GRPO implementation on unshared samples, in transformers."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from async_rl.method.types import Group, Response


def sample_distributions(model: PreTrainedModel, group: Group, response: Response, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each sampled token of a response, [R, V], from this sequence alone."""
    prompt = group.prompt.token_ids if response.prompt_ids is None else response.prompt_ids
    tokens = torch.tensor([[*prompt, *response.token_ids]])
    logits: torch.Tensor = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return logits[is_sampled(response)].log_softmax(1)


def sample_logprobs(model: PreTrainedModel, group: Group, response: Response, temperature: float) -> torch.Tensor:
    """Log-probs of the sampled tokens of a response, [R]."""
    distributions = sample_distributions(model, group, response, temperature)
    return distributions.gather(1, sampled_tokens(response)[:, None])[:, 0]


def is_sampled(response: Response) -> torch.Tensor:
    """Token by token: bool, one per token of the response."""
    return torch.tensor(
        [not any(start <= i < end for start, end in response.observed) for i in range(len(response.token_ids))]
    )


def sampled_tokens(response: Response) -> torch.Tensor:
    return torch.tensor(response.token_ids)[is_sampled(response)]


def rollouts_of(group: Group) -> Iterator[list[int]]:
    """The indices of the responses of each rollout."""
    indices = iter(range(len(group.responses)))
    for facts in group.rollouts:
        yield [next(indices) for _ in range(facts.num_responses)]


def expected_advantages(group: Group) -> list[float]:
    """Of each rollout."""
    mean = sum(group.rewards) / len(group.rewards)
    if len(group.rewards) == 1:
        return [0.0]
    std = (sum((r - mean) ** 2 for r in group.rewards) / (len(group.rewards) - 1)) ** 0.5
    return [(r - mean) / (std + 1e-6) for r in group.rewards]
