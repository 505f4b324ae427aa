"""Adapters (LoRA, arXiv 2106.09685) beside the linear layers of a model, as the embedded engine computes with them.

y = W x + alpha / rank B A x. The factors are float32 as they came, whatever the model's dtype, in which products are
computed: as the trainer does.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from async_rl.shared.protocol.adapter import A, B, adapter_fingerprint, factor_name
from async_rl.shared.protocol.inference import AdapterInfo
from async_rl.shared.weights.fingerprint import DeviceFingerprint, Fingerprint, TensorSpec
from inference_service.engine_interface import RequestRefused

LAYERS = ".layers."
"""In the names of linear layers that may have adapters: a head has none."""


@dataclass(frozen=True, slots=True)
class ReceivedAdapters:
    """The factors of one stream by their names, in its order."""

    info: AdapterInfo
    factors: Mapping[str, torch.Tensor]
    make_fingerprint: Callable[[], Fingerprint | DeviceFingerprint]
    """As the sender's: what it is of depends on what carried the stream."""

    def fingerprint(self) -> str:
        """As the sender's, of the factors as they are now."""
        return _fingerprint(self.factors, self.info.base, {self.info.scale}, self.make_fingerprint())


class LayerAdapter(torch.nn.Module):
    """The adapter of one linear layer; for inference only."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output for its input, [..., inputs] -> [..., outputs]."""
        return x @ self.a.to(x.dtype).T @ (self.b * self.scale).to(x.dtype).T


class ModelAdapters:
    """The adapters of a model; none at first. `put` and `remove` change all of them between two steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and LAYERS in name
        }
        self._hooks: list[Any] = []
        self._held: ReceivedAdapters | None = None

    def expected(self, info: AdapterInfo) -> dict[str, TensorSpec]:
        """Both factors of every layer that may have an adapter, by their names.

        Raises:
            RequestRefused: the rank is more than any layer can change.
        """
        most = max((min(module.in_features, module.out_features) for module in self._layers.values()), default=0)
        if info.rank > most:
            raise RequestRefused(
                f"the adapters have rank {info.rank}, and no layer of this model has more than {most} rows and "
                "columns: lower their rank, or start the instance with the trainer's model",
                "update_info.adapter.rank",
            )
        found = {}
        for layer, module in self._layers.items():
            for factor, shape in ((A, (info.rank, module.in_features)), (B, (module.out_features, info.rank))):
                name = factor_name(layer, factor)
                found[name] = TensorSpec(name, "float32", shape)
        return found

    def require_pairs(self, names: list[str]) -> None:
        """
        Raises:
            RequestRefused: a layer has one factor without the other.
        """
        announced = set(names)
        for layer in self._layers:
            pair = {factor_name(layer, A), factor_name(layer, B)}
            if lone := pair & announced if not pair <= announced else None:
                raise RequestRefused(
                    f"{lone.pop()!r} is announced without {(pair - announced).pop()!r}: an adapter has both",
                    "update_info.names",
                )

    def put(self, received: ReceivedAdapters) -> None:
        """Has the model compute with these adapters alone."""
        self.remove()
        for layer, module in self._layers.items():
            a, b = (received.factors.get(factor_name(layer, factor)) for factor in (A, B))
            if a is not None and b is not None:
                adapter = LayerAdapter(a, b, received.info.scale)
                module.add_module("adapter", adapter)
                self._hooks.append(module.register_forward_hook(_add_output))
        self._held = received

    def remove(self) -> None:
        """The model is its base again."""
        for hook in self._hooks:
            hook.remove()
        for module in self._layers.values():
            if hasattr(module, "adapter"):
                del module.adapter
        self._hooks, self._held = [], None

    def fingerprint(self) -> str | None:
        """Of the adapters that the model computes with, read from its layers; None without any."""
        held = self._held
        if held is None:
            return None
        found: dict[str, torch.Tensor] = {}
        scales = set()
        for layer, module in self._layers.items():
            if isinstance(adapter := getattr(module, "adapter", None), LayerAdapter):
                found |= {factor_name(layer, A): adapter.a, factor_name(layer, B): adapter.b}
                scales.add(adapter.scale)
        in_order = {name: found[name] for name in (*held.factors, *found) if name in found}
        return _fingerprint(in_order, held.info.base, scales, held.make_fingerprint())


def _fingerprint(
    factors: Mapping[str, torch.Tensor],
    base: str,
    scales: Collection[float],
    fingerprint: Fingerprint | DeviceFingerprint,
) -> str:
    for name, factor in factors.items():
        spec = TensorSpec(name, str(factor.dtype).removeprefix("torch."), tuple(factor.shape))
        fingerprint.add(spec, factor.contiguous().view(-1).view(torch.uint8))
    return adapter_fingerprint(fingerprint.hexdigest(), base, scales)


def _add_output(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    adapter = layer.adapter
    assert isinstance(adapter, LayerAdapter), "the hook is removed with the adapter"
    return output + adapter.forward(inputs[0])
