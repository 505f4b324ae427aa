"""Changes and restores the policy's adapters by classes, for a publish of adapters alone: see `canary_weights.py`.

A class is a factor, A or B, of one kind of linear layer, such as "q_proj lora_A". A changed factor is random, the same
under any layout of ranks: new adapters have B = 0, and flipped bits of 0, which are all alike, would hide in what order
an engine has them. The true factors, which are small, are kept beside the changed ones.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import torch

from async_rl.config.adapter_section import AdapterSection
from async_rl.shared.protocol.adapter import A, B
from async_rl.shared.protocol.sender import ALIKE, ALL_STRENGTHS, CONSTANT, SCALE
from trainer.hf.adapters import has_adapter
from trainer.hf.weight_map import weight_map
from trainer.model.adapters import Adapter, adapters_of
from trainer.model.gpt import RankModel

SIZES = (0.1, 0.4, 1.6)
"""By strength: the RMS of what a changed adapter adds to a layer's output, for an input with an RMS of 1 and the
smallest change of the other factor."""


@dataclass(frozen=True, slots=True)
class _Factor:
    """This rank's part of a factor, and its place in the whole."""

    parameter: torch.nn.Parameter
    name: str
    shape: tuple[int, ...]
    at: tuple[slice, ...]

    @property
    def own(self) -> torch.Tensor:
        return self.parameter.detach()

    def is_in(self, place: str) -> bool:
        """Whether its layer is `place`, or in it."""
        return self.name.startswith(f"{place}.")

    @property
    def class_name(self) -> str:
        layer, _, factor = self.name.rpartition(".")
        return f"{layer.rpartition('.')[2]} {factor}"


class CanaryAdapters:
    """The adapters of one rank's `model`, which are those of `section`."""

    def __init__(self, model: RankModel, section: AdapterSection) -> None:
        self._scale, self._rank = section.scale, section.rank or 1
        self._adapters = list(adapters_of(model).values())
        self._factors = [factor for adapter in self._adapters for factor in _factors(adapter)]
        self._true: list[torch.Tensor] | None = None
        names = (name for entry in weight_map(model.shape) if has_adapter(entry, section) for name in entry.hf_shapes)
        layers = (name.removesuffix(".weight").rpartition(".")[2] for name in names if section.targets_layer(name))
        self.classes: tuple[str, ...] = tuple(
            f"{layer} {factor}" for layer in dict.fromkeys(layers) for factor in (A, B)
        )
        """All classes, both factors of a layer one after the other; the same on every rank."""
        self.one_tensor: tuple[str, ...] = ()
        self._strengths: dict[str, int] = {}

    @property
    def are_changed(self) -> bool:
        """Whether `restore` is due."""
        return self._true is not None

    def change(self, strengths: Mapping[str, int]) -> None:
        """Sets every class to its strength, or to 0 where that is `CONSTANT`; classes left out get their true factors.

        `SCALE` multiplies what all adapters add, by so many percent; a name of a layer, or of a matrix in it, takes its
        factors to 0, whatever their classes; one of `ALIKE` makes the changed ones so.
        """
        if self._true is None:
            self._true = [factor.own.clone() for factor in self._factors]
        with torch.no_grad():
            for factor, true in zip(self._factors, self._true, strict=True):
                before, after = (_state(factor, these) for these in (self._strengths, strengths))
                if before != after:
                    factor.own.copy_(self._changed(factor, *after) if after[0] else true)
        for adapter in self._adapters:
            adapter.scale = self._scale * strengths.get(SCALE, 100) / 100
        self._strengths = dict(strengths)
        if not strengths:
            # All are true again, and training changes them until the next time.
            self._true = None

    def restore(self) -> None:
        """Restores the true adapters wherever an error or a signal left a change; needs no other rank."""
        for factor, true in zip(self._factors, self._true or (), strict=False):
            factor.own.copy_(true)
        for adapter in self._adapters:
            adapter.scale = self._scale
        self._true, self._strengths = None, {}

    def _changed(self, factor: _Factor, strength: int, alike: str) -> torch.Tensor:
        assert CONSTANT <= strength <= ALL_STRENGTHS, strength
        if strength == CONSTANT:
            return torch.zeros_like(factor.own)
        is_a = factor.name.endswith(A)
        size = SIZES[strength - 1] / SIZES[0] / sqrt(factor.shape[1]) if is_a else SIZES[strength - 1]
        if not is_a:
            size /= self._scale * sqrt(self._rank)
        seeded_by = factor.class_name if alike == "layers alike" else factor.name
        seed = int.from_bytes(hashlib.sha256(seeded_by.encode()).digest()[:8], "little")
        whole = torch.randn(factor.shape, generator=torch.Generator().manual_seed(seed))
        if alike == "ranks alike" and not is_a:
            whole = whole[:, :1].expand_as(whole)
        if alike == "values alike":
            whole = torch.ones_like(whole)
        return (whole[factor.at] * size).to(factor.own.device)


def _state(factor: _Factor, strengths: Mapping[str, int]) -> tuple[int, str]:
    """(Strength, 0 for the true factor; which of `ALIKE`, or "")."""
    if any(factor.is_in(place) for place in strengths):
        return CONSTANT, ""
    return strengths.get(factor.class_name, 0), next((alike for alike in ALIKE if alike in strengths), "")


def _factors(adapter: Adapter) -> Iterator[_Factor]:
    for parameter in adapter.parameters():
        name, shape, offset = adapter.whole[id(parameter)]
        at = tuple(slice(start, start + size) for start, size in zip(offset, parameter.shape, strict=True))
        yield _Factor(parameter, name, shape, at)
