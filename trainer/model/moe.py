"""Megatron's settings for a model with experts, to compute the same as Qwen3-MoE in transformers; for `model.py`.

A token is routed to the experts with the `top_k` largest router logits. Its weights are a softmax over all experts, or
over the chosen ones, which is the same as renormalizing the former (`norm_topk_prob`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from async_rl.model_shape import Experts


class Router(TopKRouter):
    """Megatron's router with logits by a plain product; Megatron's own needs Transformer Engine (megatron-core 0.16.1).

    Logits are in the model's dtype and only the softmax is in float32, as in the engines that sample: a token near a
    tie must be routed to the same experts here.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[T, 1, H] -> [T, 1, E] for T rows, hidden size H and E experts."""
        return F.linear(input, self.weight)


def use_router(layer: ModuleSpec) -> None:
    """Sets `Router` in the spec of a layer with experts, in place."""
    layer.submodules.mlp.submodules.router = Router


def moe_options(experts: Experts | None, recompute: str) -> dict[str, Any]:
    """TransformerConfig fields for `experts` in every layer, none for a dense model; `recompute` is the trainer's."""
    if experts is None:
        return {}
    options: dict[str, Any] = {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_pre_softmax": not experts.renormalized,
        # On-policy training has only its own loss, and drops no token.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": None,
        # Names Megatron's own grouped experts, in place of which the layers have `StackedExperts`.
        "moe_grouped_gemm": False,
    }
    if recompute == "selective":
        options["recompute_modules"] = ["moe"]
    return options
