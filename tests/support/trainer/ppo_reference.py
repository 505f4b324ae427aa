"""PPO with a critic on unshared samples in float64: transformers, its linear head, loops over tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from async_rl.method.types import Group, Response
from tests.support.trainer.grpo_reference import is_sampled, rollouts_of, sample_logprobs


@dataclass(frozen=True)
class ExpectedPPO:
    """Losses and gradients of a batch, after the division, and what the metrics are made of."""

    loss: float
    value_loss: float
    values: torch.Tensor
    returns: torch.Tensor
    policy: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]

    @property
    def explained_variance(self) -> float:
        """Not a number where all returns are equal up to rounding, which a variance above 0 does not exclude."""
        errors = self.returns - self.values
        variance = self.returns.var(unbiased=False)
        if variance <= 1e-6 * (self.returns.square() + errors.square()).mean():
            return float("nan")
        return 1 - float(errors.var(unbiased=False) / variance)


def make_reward_model(base: Path, path: Path) -> Path:
    """Saves the model of a checkpoint with a random head of one label, as a reward model; returns `path`."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.score.weight.data.copy_(0.3 * torch.randn_like(model.score.weight))
    model.save_pretrained(path)
    return path


def ppo_in_transformers(
    policy_path: Path,
    reference_path: Path,
    critic_path: Path,
    groups: Sequence[Group],
    *,
    gamma: float,
    gae_lambda: float,
    temperature: float = 1.0,
    kl_coef: float = 0.0,
    old_path: Path | None = None,
    old_critic_path: Path | None = None,
    clip: float = 0.2,
    value_clip: float = 0.2,
) -> ExpectedPPO:
    """A batch's losses, with a KL (k2) of the reported log-probs in the rewards of tokens.

    The old policy and the old critic are by default the ones in training.
    """
    # The faster ways to run experts know no float64.
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    policy, reference, old = (
        AutoModelForCausalLM.from_pretrained(path, **settings)
        for path in (policy_path, reference_path, old_path or policy_path)
    )
    critic, old_critic = (
        AutoModelForSequenceClassification.from_pretrained(path, **settings)
        for path in (critic_path, old_critic_path or critic_path)
    )
    losses, value_losses, all_values, all_returns = [], [], [], []
    for group in groups:
        for indices, reward in zip(rollouts_of(group), group.rewards, strict=True):
            for response in (group.responses[i] for i in indices):
                logprobs = sample_logprobs(policy, group, response, temperature)
                values = sample_values(critic, group, response)
                with torch.no_grad():
                    ref, before = (sample_logprobs(model, group, response, temperature) for model in (reference, old))
                    old_values = sample_values(old_critic, group, response)
                kl = (torch.tensor(response.logprobs, dtype=torch.float64) - ref) ** 2 / 2
                rewards = (-kl_coef * kl).tolist()
                rewards[-1] += reward
                found = _advantages(rewards, old_values.tolist(), gamma, gae_lambda)
                advantages = torch.tensor(found, dtype=torch.float64)
                returns = advantages + old_values
                ratios = (logprobs - before).exp()
                clipped = ratios.clamp(1 - clip, 1 + clip)
                losses.append(-torch.minimum(ratios * advantages, clipped * advantages).sum())
                near = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
                squares = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
                value_losses.append(squares.sum() / 2)
                all_values.append(old_values)
                all_returns.append(returns)
    count = sum(map(len, all_values))
    loss, value_loss = (torch.stack(some).sum() / count for some in (losses, value_losses))
    loss.backward()
    value_loss.backward()
    gradients = (
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (policy, critic)
    )
    values, returns = torch.cat(all_values), torch.cat(all_returns)
    return ExpectedPPO(float(loss.detach()), float(value_loss.detach()), values, returns, *gradients)


def sample_values(critic: PreTrainedModel, group: Group, response: Response) -> torch.Tensor:
    """The value before each sampled token of a response, from this sequence alone."""
    prompt = group.prompt.token_ids if response.prompt_ids is None else response.prompt_ids
    tokens = torch.tensor([[*prompt, *response.token_ids]])
    hidden = critic.model(tokens, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    values: torch.Tensor = critic.get_submodule("score")(hidden[is_sampled(response)])[:, 0]
    return values


def _advantages(rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float) -> list[float]:
    found = [0.0] * len(rewards)
    for t in range(len(rewards)):
        for k in range(t, len(rewards)):
            later = values[k + 1] if k + 1 < len(values) else 0.0
            found[t] += (gamma * gae_lambda) ** (k - t) * (rewards[k] + gamma * later - values[k])
    return found
