"""A layer with experts, to compute the same as those of transformers' models; for `gpt.py`.

A token is routed to the experts with the `top_k` largest router logits. Its weights are a softmax over all experts, or
over the chosen ones, which is the same as renormalizing the former (`norm_topk_prob`). The experts of one rank have one
weight for all of them, so that a layer needs two products instead of two each.

Where all experts are on one rank, rows are sorted and summed there, without Megatron's dispatchers: these select by
masks and split by counts, so that on a device the host waits several times per layer. A row has exactly k experts here:
every size is known beforehand, and nothing has to wait.

Shape legend: T rows, k experts of each, N = T k rows, sorted by expert; E experts, of this rank; H hidden size, F
feed-forward size of an expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from async_rl.shared.model_parts import ClampedGate, Experts
from trainer.attention.core_attention import SharedPromptParams
from trainer.devices.host_copies import to_device
from trainer.devices.layer_ops import LayerOps, clamped_gate


class StackedExperts(MegatronModule):
    """Experts with SwiGLU, or with biases and a `ClampedGate`, in place of Megatron's SequentialMLP, under the same
    names in checkpoints.

    Megatron's own grouped experts need an extension for CUDA or Transformer Engine.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        ops: LayerOps,
        clamped_gate: ClampedGate | None,
    ) -> None:
        super().__init__(config=config)
        self._ops = ops
        self._clamped_gate = clamped_gate
        self._first_expert = pg_collection.ep.rank() * num_local_experts
        self._dp_rank = pg_collection.expt_dp.rank()
        size = config.moe_ffn_hidden_size
        self.weight1 = self._parameter(num_local_experts, 2 * size, config.hidden_size)
        """Gate and up, [E, 2F, H]."""
        self.weight2 = self._parameter(num_local_experts, config.hidden_size, size)
        """Down, [E, H, F]."""
        if clamped_gate is not None:
            self.bias1 = self._parameter(num_local_experts, 2 * size)
            self.bias2 = self._parameter(num_local_experts, config.hidden_size)

    def forward(
        self, hidden_NH: torch.Tensor, tokens_per_expert_E: torch.Tensor, weights_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """(The experts' outputs times the router's weights, [N, H]; no bias)."""
        ends_E = tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        ends_E = ends_E if ends_E.device == hidden_NH.device else to_device(ends_E, hidden_NH.device)
        gate_up = self._ops.grouped_linear(hidden_NH, self.weight1, ends_E)
        if self._clamped_gate is not None:
            rows_N = torch.arange(len(hidden_NH), dtype=torch.int32, device=hidden_NH.device)
            expert_N = torch.searchsorted(ends_E, rows_N, right=True)
            gate_up = gate_up + self.bias1.index_select(0, expert_N)
            inner_NF = clamped_gate(gate_up, self._clamped_gate.alpha, self._clamped_gate.limit)
            out_NH = self._ops.grouped_linear(inner_NF, self.weight2, ends_E) + self.bias2.index_select(0, expert_N)
            return (out_NH * weights_N[:, None]).to(hidden_NH.dtype), None
        if self._ops.swiglu is None and self.config.bias_activation_fusion:
            inner_NF = weighted_bias_swiglu_impl(gate_up, None, weights_N[:, None])
        else:
            inner_NF = (swiglu if self._ops.swiglu is None else self._ops.swiglu)(gate_up)
            inner_NF = (inner_NF * weights_N[:, None]).to(inner_NF.dtype)
        return self._ops.grouped_linear(inner_NF, self.weight2, ends_E), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Each expert under its own number, gate and up separately, whole on the rank that has it."""
        assert not sharded_offsets, "layers are saved under their own numbers"
        parts = {"weight1": _gate_and_up, "weight2": _down, "bias1": _biases_of_gate_and_up, "bias2": _bias_of_down}
        return {
            f"{prefix}{name}": self._sharded(f"{prefix}{name}", parameter, parts[name])
            for name, parameter in self.named_parameters()
        }

    def _sharded(
        self,
        key: str,
        weight: torch.nn.Parameter,
        parts: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    ) -> ShardedTensorFactory:
        def build(name: str, stacked: torch.Tensor, replica_id: Any, flattened_range: None) -> list[ShardedTensor]:
            # Megatron has changed the layer's number in it to that within the whole model.
            prefix = name.removesuffix(key.rpartition(".")[2])
            return [
                ShardedTensor.from_rank_offsets(f"{prefix}experts.{number}.{kind}", part, replica_id=replica_id)
                for number, expert in enumerate(stacked, start=self._first_expert)
                for kind, part in parts(expert).items()
            ]

        return ShardedTensorFactory(key, weight, build, torch.stack, replica_id=(0, 0, self._dp_rank))

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype))
        # Determines over which ranks gradients are summed and optimizer states divided. Megatron's own experts (0.16.1)
        # have it only if expert parallelism is above 1, but the ranks that hold an expert are never exactly those that
        # hold the same part of a dense layer: each tensor-parallel rank routes its own rows.
        parameter.allreduce = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half: [..., 2F] -> [..., F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def use_stacked_experts(layer: ModuleSpec, ops: LayerOps, experts: Experts) -> None:
    """Sets `StackedExperts` in the spec of a layer with experts, in place."""
    options = {"ops": ops, "clamped_gate": experts.clamped_gate}
    layer.submodules.mlp.submodules.experts = ModuleSpec(module=StackedExperts, params=options)
    if not experts.shared_size:
        layer.submodules.mlp.submodules.shared_experts = None


def _gate_and_up(expert: torch.Tensor) -> dict[str, torch.Tensor]:
    gate, up = expert.chunk(2)
    return {"linear_fc1.weight_w": gate, "linear_fc1.weight_v": up}


def _down(expert: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"linear_fc2.weight": expert}


def _biases_of_gate_and_up(expert: torch.Tensor) -> dict[str, torch.Tensor]:
    gate, up = expert.chunk(2)
    return {"linear_fc1.bias_w": gate, "linear_fc1.bias_v": up}


def _bias_of_down(expert: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"linear_fc2.bias": expert}


class Router(TopKRouter):
    """Megatron's router with logits by a plain product; Megatron's own needs Transformer Engine (megatron-core 0.16.1).

    Logits are in the model's dtype and only the softmax is in float32, as in the engines that sample: a token near a
    tie must be routed to the same experts here.
    """

    given_Tk: torch.Tensor | None = None
    """The experts of each row, if they are given: weights, and so gradients, are the router's own even then."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, *, has_bias: bool = False
    ) -> None:
        super().__init__(config, pg_collection)
        if has_bias:
            self.bias = torch.nn.Parameter(torch.empty(config.num_moe_experts, dtype=config.params_dtype))
            # Makes Megatron sum its gradients over the ranks that share the rows.
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[T, 1, H] -> [T, 1, E] for T rows, hidden size H and E experts."""
        return F.linear(input, self.weight, self.bias)

    def forward(self, input: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, H] -> (weights of the chosen experts, 0 for others; which are chosen), [T, E] each."""
        if self.given_Tk is None:
            chosen: tuple[torch.Tensor, torch.Tensor] = super().forward(input, padding_mask)
            return chosen
        logits_TE = self.gating(input)[:, 0]
        if self.config.moe_router_pre_softmax:
            weights_Tk = logits_TE.softmax(-1, dtype=torch.float32).gather(1, self.given_Tk)
        else:
            weights_Tk = logits_TE.gather(1, self.given_Tk).softmax(-1, dtype=torch.float32)
        weights_TE = torch.zeros_like(logits_TE).scatter(1, self.given_Tk, weights_Tk.type_as(logits_TE))
        return weights_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, self.given_Tk, True)


class BiasedRouter(Router):
    """The router of DeepSeek-V3 (see `Grouping`), with scores in float32 or wider whatever the model's dtype."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, *, experts: Experts
    ) -> None:
        super().__init__(config, pg_collection)
        self._experts = experts
        self.choice_bias: torch.Tensor
        """[E], float32; a constant of the checkpoint. Megatron's own would move with the load of the experts."""
        self.register_buffer("choice_bias", torch.zeros(experts.num_experts))

    def forward(self, input: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, H] -> (weights of the chosen experts, 0 for others; which are chosen), [T, E] each."""
        hidden_TH, experts, wide = input[:, 0], self._experts, torch.promote_types(input.dtype, torch.float32)
        scores_TE = F.linear(hidden_TH.to(wide), self.weight.to(wide)).sigmoid()
        chosen_Tk = self._chosen(scores_TE.detach()) if self.given_Tk is None else self.given_Tk
        weights_Tk = scores_TE.gather(1, chosen_Tk)
        if experts.renormalized:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
        weights_Tk = weights_Tk * experts.grouping.scale if experts.grouping else weights_Tk
        weights_TE = torch.zeros_like(scores_TE).scatter(1, chosen_Tk, weights_Tk)
        return weights_TE, torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_Tk, True)

    def _chosen(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The numbers of the `top_k` experts, [T, k]."""
        ranked_TE, grouping = scores_TE + self.choice_bias, self._experts.grouping
        if grouping is not None and grouping.num_groups > 1:
            by_group = ranked_TE.unflatten(1, (grouping.num_groups, -1))
            best_Tg = by_group.topk(2, dim=-1).values.sum(-1).topk(grouping.top_groups, dim=-1).indices
            is_out_TG = torch.ones(*by_group.shape[:2], dtype=torch.bool, device=best_Tg.device).scatter(
                1, best_Tg, False
            )
            ranked_TE = by_group.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)
        return ranked_TE.topk(self._experts.top_k, dim=-1).indices


class ReplayingExperts(MoELayer):
    """A layer's experts that take the rows' routes with them into the pass that computes them again: by then the layer
    may have run another micro-batch."""

    given_Tk: torch.Tensor | None = None
    """Of the next pass: see `Router`."""
    computes_again: bool = False

    def forward(
        self, hidden_T1H: torch.Tensor, intermediate_tensors: None = None, padding_mask: None = None
    ) -> tuple[torch.Tensor, None]:
        given_Tk = self.given_Tk

        def run(hidden_T1H: torch.Tensor) -> tuple[torch.Tensor, None]:
            self.router.given_Tk = given_Tk
            out: tuple[torch.Tensor, None] = MoELayer.forward(self, hidden_T1H)
            return out

        made: tuple[torch.Tensor, None] = (
            tensor_parallel.checkpoint(run, False, hidden_T1H) if self.computes_again else run(hidden_T1H)
        )
        return made


class ReplayingLayer(TransformerLayer):
    """Hands the routes of a micro-batch to the layer's experts, also where the whole layer is computed again."""

    def forward(self, *args: Any, packed_seq_params: SharedPromptParams, **options: Any) -> Any:
        self.mlp.given_Tk = self._routes(packed_seq_params.routes_TW)
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)

    def _routes(self, routes_TW: torch.Tensor | None) -> torch.Tensor | None:
        """This layer's, of this rank's rows."""
        if routes_TW is None:
            return None
        num_chosen, parallel = self.config.moe_router_topk, self.config.tensor_model_parallel_size
        share = len(routes_TW) // parallel
        first_row = share * parallel_state.get_tensor_model_parallel_rank()
        first = num_chosen * (self.layer_number - 1)
        return routes_TW[first_row : first_row + share, first : first + num_chosen].long()


def keep_routes(model: torch.nn.Module) -> None:
    """Makes every layer's experts `ReplayingExperts`, in place: Megatron builds its own class only."""
    for layer in model.modules():
        if type(layer) is MoELayer:
            layer.__class__ = ReplayingExperts
            layer.computes_again = bool(layer.moe_layer_recompute)  # type: ignore[assignment]
            layer.moe_layer_recompute = False  # type: ignore[assignment]


def keep_biases_wide(model: torch.nn.Module) -> None:
    """Makes the biases of routers float32 again after the model was cast."""
    for module in model.modules():
        if isinstance(module, BiasedRouter):
            module.choice_bias = module.choice_bias.float()


def use_router(layer: ModuleSpec, experts: Experts) -> None:
    """Sets the router in the spec of a layer with experts, and what hands it routes, in place."""
    layer.module = ReplayingLayer
    router = partial(Router, has_bias=experts.clamped_gate is not None)
    if experts.grouping is not None:
        router = partial(BiasedRouter, experts=experts)
    layer.submodules.mlp.submodules.router = router


def moe_options(experts: Experts | None, recompute: str) -> dict[str, Any]:
    """TransformerConfig fields for `experts`, none for a dense model; `recompute` is the trainer's."""
    if experts is None:
        return {}
    options: dict[str, Any] = {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_pre_softmax": not experts.renormalized or experts.grouping is not None,
        # On-policy training has only its own loss, and drops no token.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": None,
        # Names Megatron's own grouped experts, in place of which the layers have `StackedExperts`.
        "moe_grouped_gemm": False,
    }
    if experts.shared_size:
        options["moe_shared_expert_intermediate_size"] = experts.shared_size
        options["moe_shared_expert_gate"] = experts.gates_shared
    if recompute == "selective":
        options["recompute_modules"] = ["moe", "mlp"]
    return options


def keep_rows_local(model: torch.nn.Module) -> None:
    """Replaces the dispatcher of every layer whose experts are all on this rank."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.token_dispatcher.ep_size == 1:
            layer.token_dispatcher = _LocalDispatcher(layer.config, get_default_pg_collection())


class _LocalDispatcher(MoETokenDispatcher):
    """Sorts rows by expert, and sums their results in the order of the experts."""

    def dispatch_preprocess(
        self, hidden_T1H: torch.Tensor, routing_map_TE: torch.Tensor, probs_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Rows by expert, [N, H]; the router's weight of each, [N])."""
        self._shape, self._num_chosen = hidden_T1H.shape, self.config.moe_router_topk
        chosen_Tk = routing_map_TE.float().topk(self._num_chosen, dim=1).indices.sort(dim=1).values
        self._order_N = chosen_Tk.flatten().argsort(stable=True)
        rows_N = self._order_N // self._num_chosen
        weights_N = probs_TE.gather(1, chosen_Tk).flatten().index_select(0, self._order_N)
        self._tokens_per_expert_E = routing_map_TE.sum(dim=0)
        return hidden_T1H.flatten(0, 1).index_select(0, rows_N), weights_N

    def token_dispatch(self, hidden_NH: torch.Tensor, weights_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_NH, weights_N

    def dispatch_postprocess(
        self, hidden_NH: torch.Tensor, weights_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hidden_NH, self._tokens_per_expert_E, weights_N

    def combine_preprocess(self, out_NH: torch.Tensor) -> torch.Tensor:
        return out_NH

    def token_combine(self, out_NH: torch.Tensor) -> torch.Tensor:
        return out_NH

    def combine_postprocess(self, out_NH: torch.Tensor) -> torch.Tensor:
        by_row_NH = out_NH.index_select(0, self._order_N.argsort())
        out_TH: torch.Tensor = by_row_NH.unflatten(0, (-1, self._num_chosen)).sum(1)
        return out_TH.view(self._shape)
