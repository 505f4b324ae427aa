"""Routes drawn at random, and transformers' models that follow given ones: an independent router replay."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from async_rl.method.token_arrays import ExpertIds
from async_rl.method.types import Group
from async_rl.shared.model_shape import ModelShape


def with_random_routes(groups: Sequence[Group], shape: ModelShape, rng: random.Random) -> list[Group]:
    """The groups as if each row had chosen any experts in each layer."""
    assert shape.experts is not None
    num_experts, num_chosen = shape.experts.num_experts, shape.experts.top_k

    def drawn(num_rows: int) -> ExpertIds:
        choices = (rng.sample(range(num_experts), num_chosen) for _ in range(num_rows * shape.num_layers))
        return ExpertIds(expert for chosen in choices for expert in chosen)

    def one(group: Group) -> Group:
        responses = [replace(response, routes=drawn(len(response.token_ids) - 1)) for response in group.responses]
        for prompt, (first, *_) in group.responses_by_prompt.items():
            responses[first] = replace(responses[first], prompt_routes=drawn(len(prompt)))
        return replace(group, responses=tuple(responses))

    return [one(group) for group in groups]


def routes_of(group: Group, number: int, shape: ModelShape) -> torch.Tensor:
    """The routes of prompt and response `number` as one sequence, [rows, layers, k]."""
    assert shape.experts is not None
    (first,) = (indices[0] for indices in group.responses_by_prompt.values() if number in indices)
    parts = (group.responses[first].prompt_routes, group.responses[number].routes)
    flat = torch.tensor([expert for part in parts if part is not None for expert in part])
    return flat.view(-1, shape.num_layers, shape.experts.top_k)


@contextmanager
def following(model: PreTrainedModel, routes_TLk: torch.Tensor) -> Iterator[None]:
    """In its body the model sends each row of one sequence to these experts; rows after them choose their own."""

    def of_layer(layer: int, has_sigmoids: bool) -> Any:
        def hook(gate: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden_TH = inputs[0].reshape(-1, inputs[0].shape[-1])
            logits_TE = F.linear(hidden_TH, gate.weight, getattr(gate, "bias", None))
            logits_or_scores, weights_Tk, chosen_Tk = output
            chosen_Tk = torch.cat([routes_TLk[:, layer], chosen_Tk[len(routes_TLk) :]])
            if has_sigmoids:
                weights_Tk = logits_TE.sigmoid().gather(1, chosen_Tk)
                if getattr(gate, "norm_topk_prob", True):
                    weights_Tk = weights_Tk / (weights_Tk.sum(1, keepdim=True) + 1e-20)
                weights_Tk = weights_Tk * getattr(gate, "routed_scaling_factor", 1.0)
            else:
                weights_Tk = logits_TE.softmax(1).gather(1, chosen_Tk)
                if getattr(gate, "norm_topk_prob", True):
                    weights_Tk = weights_Tk / weights_Tk.sum(1, keepdim=True)
            return logits_or_scores, weights_Tk, chosen_Tk

        return hook

    hooks = []
    for number, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if router is not None:
            has_sigmoids = any(hasattr(module, "e_score_correction_bias") for module in (router, layer.mlp))
            hooks.append(router.register_forward_hook(of_layer(number, has_sigmoids)))
    assert hooks, "the model has no experts"
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
