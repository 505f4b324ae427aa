"""A device's layer operations as modules of Megatron's local layer spec; `trainer/model/gpt.py` calls it.

Shape legend: T fed rows, A heads of this rank, D head dimension, F feed-forward size of this rank; 1 is Megatron's
batch dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from async_rl.shared.model_families import MLP_BIAS, OUT_BIAS
from async_rl.shared.model_shape import ModelShape
from trainer.devices.layer_ops import LayerOps, geglu


class RMSNorm(torch.nn.Module):
    """A norm of Megatron's layers by the given operation, which starts at a factor of 1.

    Unlike Megatron's own local norm it supports sequence parallelism, and it needs neither Apex nor Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        op: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        offset: float = 0.0,
    ) -> None:
        """`offset` is added to the weight, as in Gemma and Qwen3-Next; the norm is in float32 or wider then."""
        super().__init__()
        self.weight = torch.nn.Parameter((torch.zeros if offset else torch.ones)(hidden_size))
        self._offset = offset
        # Makes Megatron sum its gradients over the ranks that share the rows.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps
        self._op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._offset:
            return self._op(x, self.weight, self._eps)
        # Half precision would round 1 + w, so all is wide and rounded once, as in transformers.
        wide = torch.promote_types(x.dtype, torch.float32)
        return self._op(x.to(wide), self.weight.to(wide) + self._offset, self._eps).to(x.dtype)


class JointRMSNorm(RMSNorm):
    """One norm of all heads' queries, or of all heads' keys, as OLMo 2 has them (arXiv 2501.00656).

    Tensor-parallel ranks have some heads each, and the mean of squares is over those of all ranks; ranks that share a
    head count it together once. The weight is whole on every rank, and its gradients are summed over the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        op: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        num_heads: int,
    ) -> None:
        """`hidden_size` is that of one head."""
        super().__init__(config, num_heads * hidden_size, eps, op=op)
        self._num_ranks = config.tensor_model_parallel_size
        self._num_sharing = max(1, self._num_ranks // num_heads)

    def forward(self, x_T1AD: torch.Tensor) -> torch.Tensor:
        x_T1 = x_T1AD.flatten(-2)
        if self._num_ranks == 1:
            return super().forward(x_T1).view_as(x_T1AD)
        size = x_T1.shape[-1]
        start = parallel_state.get_tensor_model_parallel_rank() // self._num_sharing * size
        wide = x_T1.to(torch.promote_types(x_T1.dtype, torch.float32))
        squares: torch.Tensor = _SumOverRanks.apply(wide.square().sum(-1, keepdim=True))  # type: ignore[no-untyped-call]
        scale = (squares / self._num_sharing / len(self.weight) + self._eps).rsqrt()
        normed_T1: torch.Tensor = wide * scale * self.weight[start : start + size]
        return normed_T1.to(x_T1.dtype).view_as(x_T1AD)


class _SumOverRanks(torch.autograd.Function):
    """Over the tensor-parallel ranks, each of which uses the sum for itself: so their gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
        total = dout.clone()
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total


class NormedAdd(torch.nn.Module):
    """Adds a half of a layer, normed, to the residual stream, in place of Megatron's `get_bias_dropout_add`."""

    def __init__(self, hidden_size: int, config: TransformerConfig, norm: ModuleSpec) -> None:
        super().__init__()
        self.norm = build_module(norm, config, hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return self._add

    def _add(
        self, out_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float
    ) -> torch.Tensor:
        out, bias = out_with_bias
        # Megatron's layer turns gradients on here, also where nothing needs them.
        with torch.set_grad_enabled(out.requires_grad):
            normed: torch.Tensor = self.norm(out if bias is None else out + bias)
            return residual + normed


class GatedActivation(torch.nn.Module):
    """The activation of Megatron's MLP by the given operation, [..., 2F] -> [..., F]."""

    def __init__(self, config: TransformerConfig, *, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._op(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """No weights for a checkpoint: Megatron's MLP asks all of its modules."""
        return {}


def norm_spec(ops: LayerOps, shape: ModelShape) -> ModuleSpec:
    """The spec of a norm, in a layer or after the last one."""
    return ModuleSpec(module=RMSNorm, params={"op": ops.rms_norm, "offset": shape.norm_offset})


def use_norms(layer: ModuleSpec, config: TransformerConfig, shape: ModelShape, ops: LayerOps) -> None:
    """Sets a layer spec's norms, in place."""
    norm = norm_spec(ops, shape)
    added = ModuleSpec(module=NormedAdd, params={"hidden_size": shape.hidden_size, "config": config, "norm": norm})
    before_attention, after_attention, before_mlp, after_mlp = shape.norms
    parts = layer.submodules
    parts.input_layernorm, parts.pre_mlp_layernorm = (
        IdentityOp if name is None else norm for name in (before_attention, before_mlp)
    )
    parts.self_attn_bda = parts.self_attn_bda if after_attention is None else added
    parts.mlp_bda = parts.mlp_bda if after_mlp is None else added
    if (num_heads := shape.qk_norm_heads) is None:
        return
    attention = parts.self_attention.submodules
    if num_heads == (1, 1):
        attention.q_layernorm = attention.k_layernorm = norm
    else:
        attention.q_layernorm, attention.k_layernorm = (
            ModuleSpec(module=JointRMSNorm, params={"op": ops.rms_norm, "num_heads": heads}) for heads in num_heads
        )


def use_activation(layer: ModuleSpec, shape: ModelShape, ops: LayerOps) -> None:
    """Sets the activation in a layer spec, in place."""
    op = geglu if shape.has_gelu else ops.swiglu
    if op is not None:
        mlp = layer.submodules.mlp.submodules
        # Experts have their own (see `experts.py`), but for those that all rows pass.
        shared = getattr(mlp, "shared_experts", None)
        mlp = mlp if shared is None else shared.submodules
        if isinstance(mlp, MLPSubmodules):
            mlp.activation_func = ModuleSpec(module=GatedActivation, params={"op": op})


class _BiasedColumns(ColumnParallelLinear):
    """With a bias, whatever Megatron's layer asks for: its config has one switch for all biases."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)


class _BiasedRows(RowParallelLinear):
    """Adds its bias itself: what recomputes a feed-forward part would hand the parameter through its autograd function,
    which makes the parameter an output of that (megatron-core 0.16.1)."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, bias = super().forward(input_)
        return out + bias, None


def use_biases(layer: ModuleSpec, shape: ModelShape) -> None:
    """Sets linear layers with biases in a layer spec, in place; those of queries, keys and values have a switch."""
    if shape.has(OUT_BIAS):
        layer.submodules.self_attention.submodules.linear_proj = _BiasedRows
    mlp = layer.submodules.mlp.submodules
    if shape.has(MLP_BIAS) and isinstance(mlp, MLPSubmodules):
        mlp.linear_fc1, mlp.linear_fc2 = _BiasedColumns, _BiasedRows


def scaled_add(multiplier: float) -> Callable[..., Any]:
    """What adds a half of a layer to the residual stream, in place of Megatron's `get_bias_dropout_add`: times
    `multiplier`, as Granite has it."""

    def add(out_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float) -> torch.Tensor:
        out, bias = out_with_bias
        return residual + (out if bias is None else out + bias) * multiplier

    return lambda training, fused: add


def activation_options(shape: ModelShape, ops: LayerOps) -> dict[str, Any]:
    """TransformerConfig fields with which Megatron's MLP takes its activation from the spec, if that has one."""
    if ops.swiglu is None and not shape.has_gelu:
        return {}
    return {"use_te_activation_func": True, "bias_activation_fusion": False}


def use_linear(model: torch.nn.Module, ops: LayerOps) -> None:
    """Sets the function of Megatron's linear layers, in place, except those that exchange rows amid their products."""
    if ops.linear is None:
        return
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.sequence_parallel:
            module._forward_impl = ops.linear
