"""What an engine may do wrong with adapters that it received right, planted by name in the embedded engine.

Of adapters that are published alone the factors beside the layers are changed, after they were put in service; of
merged ones what they add to each matrix, which is known from the base.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from inference_service.weight_transfer.adapters import LayerAdapter, ModelAdapters, ReceivedAdapters
from inference_service.weight_transfer.weight_update import WeightUpdate

SCALE_FACTOR = 1.3

Layers = Mapping[str, torch.nn.Linear]
"""Those with adapters, by name."""


def _random_like(factor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(factor.numel())
    size = float(factor.norm()) / factor.numel() ** 0.5 + 0.01
    made: torch.Tensor = size * torch.randn(factor.shape, generator=generator)
    return made


def _each(change: Callable[[LayerAdapter], None], only: str = "") -> Callable[["AlonePlant", Layers], None]:
    """Changes the adapters of layers with `only` in their names."""

    def plant(_: "AlonePlant", layers: Layers) -> None:
        for name, layer in layers.items():
            if only in name:
                change(layer.adapter)  # type: ignore[arg-type]

    return plant


def _set(**factors: Callable[[LayerAdapter], Any]) -> Callable[[LayerAdapter], None]:
    def change(adapter: LayerAdapter) -> None:
        for name, value_of in factors.items():
            setattr(adapter, name, value_of(adapter))

    return change


def _older(plant: "AlonePlant", layers: Layers) -> None:
    for name, layer in layers.items():
        adapter: Any = layer.adapter
        before = plant.before.get(name)
        adapter.a, adapter.b = before or (adapter.a, torch.zeros_like(adapter.b))


def _older_a(plant: "AlonePlant", layers: Layers) -> None:
    for name, layer in layers.items():
        adapter: Any = layer.adapter
        adapter.a = plant.before[name][0] if name in plant.before else _random_like(adapter.a)


def _merged_too(plant: "AlonePlant", layers: Layers) -> None:
    for name, layer in layers.items():
        adapter: Any = layer.adapter
        added = adapter.scale * adapter.b @ adapter.a
        with torch.no_grad():
            layer.weight += (added - plant.merged.get(name, torch.zeros(()))).to(layer.weight.dtype)
        plant.merged[name] = added


ALONE: dict[str, Callable[["AlonePlant", Layers], None]] = {
    "the base": _each(_set(scale=lambda _: 0.0)),
    "an older adapter": _older,
    "another scale": _each(_set(scale=lambda its: its.scale * SCALE_FACTOR)),
    "a layer left out": _each(_set(scale=lambda _: 0.0), ".layers.0."),
    "a matrix left out": _each(_set(scale=lambda _: 0.0), ".layers.1.mlp.up_proj"),
    "permuted ranks": _each(_set(b=lambda its: its.b.roll(1, 1))),
    "A and B of two versions": _older_a,
    "a transposed B": _each(_set(b=lambda its: its.b.T.reshape(its.b.shape))),
    "a zeroed B": _each(_set(b=lambda its: torch.zeros_like(its.b))),
    "another run's": _each(_set(a=lambda its: _random_like(its.a), b=lambda its: _random_like(its.b))),
    "merged and beside": _merged_too,
    "alpha for alpha / rank": _each(_set(scale=lambda its: its.scale * its.a.shape[0])),
}


class AlonePlant:
    """Plants one fault of `ALONE` in every `ModelAdapters`; `shows`: fingerprints tell what is there."""

    def __init__(self, fault: str, *, shows: bool = False) -> None:
        self._plant = ALONE[fault]
        self._shows = shows
        self.before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """By layer: the factors of the publish before."""
        self.merged: dict[str, torch.Tensor] = {}

    def in_(self, adapters: ModelAdapters) -> None:
        """Breaks one model's adapters from now on."""
        put = adapters.put

        def put_and_change(received: ReceivedAdapters) -> None:
            put(received)
            layers = {name: layer for name, layer in adapters._layers.items() if hasattr(layer, "adapter")}
            of_layers: dict[str, Any] = {name: layer.adapter for name, layer in layers.items()}
            sent = {name: (adapter.a, adapter.b) for name, adapter in of_layers.items()}
            self._plant(self, layers)
            self.before = sent
            if not self._shows:
                adapters.fingerprint = received.fingerprint  # type: ignore[method-assign]

        adapters.put = put_and_change  # type: ignore[method-assign]

    def in_all(self) -> None:
        """Breaks all models of this process."""
        make = ModelAdapters.__init__

        def make_broken(adapters: ModelAdapters, model: torch.nn.Module) -> None:
            make(adapters, model)
            self.in_(adapters)

        ModelAdapters.__init__ = make_broken  # type: ignore[assignment, method-assign]


Delta = Callable[[str, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(name, what was added to the base, the same of the publish before) -> what the engine has added."""

RANK = 4
MERGED: dict[str, Delta] = {
    "the base": lambda name, now, before: torch.zeros_like(now),
    "an older adapter": lambda name, now, before: torch.zeros_like(now) if before is None else before,
    "another scale": lambda name, now, before: SCALE_FACTOR * now,
    "a layer left out": lambda name, now, before: 0 * now if ".layers.0." in name else now,
    "a matrix left out": lambda name, now, before: 0 * now if ".layers.1.mlp.up_proj" in name else now,
    "a transposed B": lambda name, now, before: now.T.reshape(now.shape),
    "another run's": lambda name, now, before: _random_like(now),
    "merged and beside": lambda name, now, before: 2 * now,
    "alpha for alpha / rank": lambda name, now, before: RANK * now,
}
"""Without those that need the factors themselves."""


def plant_merged(fault: str) -> None:
    """Breaks all instances of this process, whose fingerprints stay those of what was sent."""
    make, finish = WeightUpdate.__init__, WeightUpdate.finish

    def make_broken(self: Any, model: torch.nn.Module) -> None:
        make(self, model)
        self.base = {name: view.clone() for name, view in self._views.items() if view.ndim == 2}
        self.before = {}

    def finish_and_change(self: Any) -> None:
        finish(self)
        with torch.no_grad():
            for name, base in self.base.items():
                added = self._views[name] - base
                self._views[name].copy_(base + MERGED[fault](name, added, self.before.get(name)))
                self.before[name] = added

    WeightUpdate.__init__ = make_broken  # type: ignore[method-assign]
    WeightUpdate.finish = finish_and_change  # type: ignore[method-assign]
