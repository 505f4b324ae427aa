"""The formulas of every algorithm, with whatever cuts across, written out per token: an independent implementation.

They use Python's numbers and its statistics, and tensors only for what is differentiated.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from async_rl.method.algorithms import Tokens
from async_rl.method.algorithms.random_groups import RandomGroup
from tests.support.algorithms import MAX_RESPONSE_TOKENS

DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalize": "constant", "scale_by_std": False},
    "dapo": {"clip_high": 0.28},
    "rloo": {"scale_by_std": False},
    "reinforce_pp_baseline": {"scale_by_std": False},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "normalize": "sequence"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"normalize": "sequence"},
    "dppo": {},
    "maxrl": {"scale_by_std": False},
    "gdpo": {"scale_by_std": "batch"},
    "pf_ppo": {},
    "online_dpo": {},
    "distillation": {"scale_by_std": False},
    "ppo": {"scale_by_std": False},
}
COMMON = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "normalize": "token",
    "scale_by_std": True,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "entropy_coef": 0.0,
    "importance_high": 2.0,
    "teacher_coef": 1.0,
    "options": {},
}


def stdev(values: Sequence[float]) -> float:
    """A single value has no deviation."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Written:
    """The formulas, under some settings, of one batch."""

    settings: dict[str, Any]
    batch: Sequence[RandomGroup]

    def __getitem__(self, key: str) -> Any:
        name = self.settings["name"]
        assert name in DEFAULTS, f"write the formula of {name!r} here, and its defaults in DEFAULTS"
        return (COMMON | DEFAULTS[name] | self.settings).get(key)

    def rewards(self, group: RandomGroup) -> list[float]:
        """Shaped ones."""
        shaped = []
        for k, reward in enumerate(group.rollouts.rewards):
            if (cache := self["overlong_tokens"]) is not None:
                over = (MAX_RESPONSE_TOKENS - cache) - group.rollouts.lengths[k]
                reward += 0 if over >= 0 else max(over / cache, -1)
            if self["kl_in"] == "reward" and self["kl_coef"]:
                assert group.rollouts.kl is not None
                reward -= self["kl_coef"] * group.rollouts.kl[k]
            shaped.append(reward)
        return shaped

    def weight(self, group: RandomGroup, k: int) -> float:
        if self["mask_truncated"] and group.rollouts.truncated[k]:
            return 0.0
        of_nodes = group.rollouts.weights[k] if group.rollouts.weights else 1.0
        if self["name"] == "pf_ppo":
            return of_nodes * math.pow(abs(self.rewards(group)[k]), self["options"].get("power", 2.0))
        return of_nodes

    def advantages(self, group: RandomGroup) -> list[float]:
        """Before the whole batch's part of it."""
        name = self["name"]
        if name in ("distillation", "ppo"):
            return [0.0] * len(group.rollouts.rewards)
        rewards = self.rewards(group)
        if name == "gdpo":
            return self.of_parts(group, rewards)
        centred = [reward - mean(rewards) for reward in rewards]
        if self["scale_by_std"] is True:
            centred = [value / (stdev(rewards) + 1e-6) for value in centred]
        if name == "rloo":
            # A deviation that the paper does not have divides what remains.
            factor = 1.0 if self["scale_by_std"] is not True else 1 / (stdev(rewards) + 1e-6)
            others = [[x for j, x in enumerate(rewards) if j != i] for i in range(len(rewards))]
            centred = [factor * (reward - mean(rest or [reward])) for reward, rest in zip(rewards, others, strict=True)]
        if name == "maxrl":
            centred = [value / mean(rewards) if mean(rewards) else 0.0 for value in centred]
        return centred

    def of_parts(self, group: RandomGroup, rewards: Sequence[float]) -> list[float]:
        parts = dict(group.rollouts.parts) or {"reward": group.rollouts.rewards}
        scales = bool(self["scale_by_std"])
        parts["shaping"] = tuple(round(s - r, 12) for s, r in zip(rewards, group.rollouts.rewards, strict=True))
        found = [0.0] * len(rewards)
        for part, values in parts.items():
            weight = self["options"].get("weights", {}).get(part, 1.0)
            for k, value in enumerate(values):
                found[k] += weight * (value - mean(values)) / (stdev(values) + 1e-6 if scales else 1.0)
        return found

    def of_batch(self) -> list[list[float]]:
        """The advantages as they are used."""
        found = [self.advantages(group) for group in self.batch]
        if self["name"] == "reinforce_pp_baseline":
            tokens = [
                value
                for group, values in zip(self.batch, found, strict=True)
                for k, value in enumerate(values)
                for _ in range(group.rollouts.lengths[k] if self.weight(group, k) else 0)
            ]
            counts = [
                self.weight(group, k)
                for group in self.batch
                for k, length in enumerate(group.rollouts.lengths)
                for _ in range(length if self.weight(group, k) else 0)
            ]
            total = math.fsum(counts)
            middle = math.fsum(n * x for n, x in zip(counts, tokens, strict=True)) / total
            spread = math.fsum(n * (x - middle) ** 2 for n, x in zip(counts, tokens, strict=True)) / max(total - 1, 1)
            scale = math.sqrt(spread + 1e-8)
            return [[(value - middle) / scale for value in values] for values in found]
        if self["scale_by_std"] != "batch":
            return found
        scaled = found if self["name"] == "gdpo" else [self.rewards(group) for group in self.batch]
        deviation = stdev([value for values in scaled for value in values]) + 1e-6
        return [[value / deviation for value in values] for values in found]

    def loss(self) -> torch.Tensor:
        if self["name"] == "online_dpo":
            return self.of_pairs()
        advantages, total, count = self.of_batch(), torch.zeros((), dtype=torch.float64), 0.0
        for group, of_group in zip(self.batch, advantages, strict=True):
            for k, advantage in enumerate(of_group):
                own = [tokens for rollout, tokens in group.responses if rollout == k]
                terms = [term for tokens in own for term in self.terms(tokens, advantage)]
                weight, length = self.weight(group, k), len(terms)
                total = total + weight * sum(terms) / (length if self["normalize"] == "sequence" else 1)
                each = {"token": length, "sequence": 1, "constant": MAX_RESPONSE_TOKENS}
                count += weight * each[self["normalize"]]
        return total / (count or 1.0)

    def terms(self, tokens: Tokens, advantage: float) -> Iterator[torch.Tensor]:
        """The loss of each token of a response."""
        new, old = tokens.logprobs_N, tokens.old_logprobs_N
        level = torch.exp((new - old).sum() / len(new)) if self["name"] == "gspo" else None
        for t in range(len(new)):
            value = advantage if tokens.advantages_N is None else float(tokens.advantages_N[t])
            if tokens.rewards_N is not None:
                value += float(tokens.rewards_N[t])
            if tokens.teacher_logprobs_N is not None:
                value -= self["teacher_coef"] * float(new[t].detach() - tokens.teacher_logprobs_N[t])
            term = self.surrogate(new[t], old[t], value, level) * self.correction(tokens, t)
            if self["kl_coef"] and self["kl_in"] == "loss":
                assert tokens.ref_logprobs_N is not None
                term = term + self["kl_coef"] * self.kl(new[t], tokens.ref_logprobs_N[t])
            term = term - self["entropy_coef"] * tokens.entropy_N[t]
            yield term if tokens.weights_N is None else term * float(tokens.weights_N[t])

    def surrogate(
        self, new: torch.Tensor, old: torch.Tensor, advantage: float, level: torch.Tensor | None
    ) -> torch.Tensor:
        ratio = torch.exp(new - old) if level is None else level
        name, r = self["name"], float(ratio.detach())
        low, high = 1 - float(self["clip_low"]), 1 + float(self["clip_high"])
        if name == "cispo":
            return -min(max(r, low), high) * advantage * new
        if name == "sapo":
            of_sign = ("tau_positive", 1.0) if advantage > 0 else ("tau_negative", 1.05)
            tau = float(self["options"].get(*of_sign))
            return -4 / tau * advantage / (1 + torch.exp(-tau * (ratio - 1)))
        if name == "dppo":
            moved = math.exp(float(new.detach())) - math.exp(float(old))
            delta = self["options"].get("delta", 0.2)
            if (advantage > 0 and moved > delta) or (advantage < 0 and moved < -delta):
                return 0 * ratio
            return -ratio * advantage
        if (advantage > 0 and r > high) or (advantage < 0 and r < low):
            return torch.tensor(-(high if advantage > 0 else low) * advantage, dtype=torch.float64)
        return -ratio * advantage

    def correction(self, tokens: Tokens, t: int) -> float:
        kind = self["importance"]
        if kind is None:
            return 1.0
        assert tokens.rollout_logprobs_N is not None
        gaps = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).tolist()
        weight = math.exp(math.fsum(gaps) if kind.startswith("sequence") else gaps[t])
        if kind.endswith("truncate"):
            return min(weight, float(self["importance_high"]))
        return weight if 1 / self["importance_high"] <= weight <= self["importance_high"] else 0.0

    def kl(self, new: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
        gap = new - ref
        estimates = {"k1": gap, "k2": gap**2 / 2, "k3": torch.exp(-gap) - 1 + gap}
        return estimates[self["kl_estimator"]]

    def of_pairs(self) -> torch.Tensor:
        total, num_pairs = torch.zeros((), dtype=torch.float64), 0
        for group in self.batch:
            rewards = self.rewards(group)
            counted = [k for k in range(len(rewards)) if self.weight(group, k)]
            if len({rewards[k] for k in counted}) < 2:
                continue
            best = next(k for k in counted if rewards[k] == max(rewards[j] for j in counted))
            worst = next(k for k in counted if rewards[k] == min(rewards[j] for j in counted))
            margin = self.distance(group, best) - self.distance(group, worst)
            beta = self["options"].get("beta", 0.1)
            total, num_pairs = total - torch.log(1 / (1 + torch.exp(-beta * margin))), num_pairs + 1
        return total / max(num_pairs, 1)

    def distance(self, group: RandomGroup, k: int) -> torch.Tensor:
        found = torch.zeros((), dtype=torch.float64)
        for rollout, tokens in group.responses:
            if rollout == k:
                assert tokens.ref_logprobs_N is not None
                found = found + sum(tokens.logprobs_N - tokens.ref_logprobs_N)
        return found
