"""A device's layer operations as modules of Megatron's local layer spec; `trainer/model/gpt.py` calls it.

Shape legend: F feed-forward size of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from async_rl.shared.model_families import MLP_BIAS, NORMS_FROM_ONE, OUT_BIAS
from async_rl.shared.model_shape import ModelShape
from trainer.devices.layer_ops import LayerOps


class RMSNorm(torch.nn.Module):
    """A norm of Megatron's layers by the given operation; its weight starts at 1, or, with `from_one`, 1 + weight does.

    Unlike Megatron's own local norm it supports sequence parallelism, and it needs neither Apex nor Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        op: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        from_one: bool = False,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter((torch.zeros if from_one else torch.ones)(hidden_size))
        # Makes Megatron sum its gradients over the ranks that share the rows.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps
        self._op = op
        self._from_one = from_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._from_one:
            return self._op(x, self.weight, self._eps)
        # Half precision would round 1 + w, so all is wide and rounded once, as in transformers.
        wide = torch.promote_types(x.dtype, torch.float32)
        return self._op(x.to(wide), 1 + self.weight.to(wide), self._eps).to(x.dtype)


class SwiGLU(torch.nn.Module):
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
    return ModuleSpec(module=RMSNorm, params={"op": ops.rms_norm, "from_one": shape.has(NORMS_FROM_ONE)})


def use_layer_ops(layer: ModuleSpec, ops: LayerOps, shape: ModelShape) -> None:
    """Sets norms and activation in a layer spec, in place; the core attention applies the rotary embedding."""
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm_spec(ops, shape)
    if shape.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm_spec(ops, shape)
    if ops.swiglu is not None:
        mlp = layer.submodules.mlp.submodules
        # Experts have their own (see `experts.py`), but for those that all rows pass.
        shared = getattr(mlp, "shared_experts", None)
        mlp = mlp if shared is None else shared.submodules
        if isinstance(mlp, MLPSubmodules):
            mlp.activation_func = ModuleSpec(module=SwiGLU, params={"op": ops.swiglu})


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


def swiglu_options(ops: LayerOps) -> dict[str, Any]:
    """TransformerConfig fields with which Megatron's MLP takes its activation from the spec, if `ops` has one."""
    return {} if ops.swiglu is None else {"use_te_activation_func": True}


def use_linear(model: torch.nn.Module, ops: LayerOps) -> None:
    """Sets the function of Megatron's linear layers, in place, except those that exchange rows amid their products."""
    if ops.linear is None:
        return
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.sequence_parallel:
            module._forward_impl = ops.linear
