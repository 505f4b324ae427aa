"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen linear layers of a model.

A linear layer y = W x with an adapter gives y = W x + (alpha / rank) B A x. Each Hugging Face matrix W [O, I] has
factors of its own, A [rank, I] and B [O, rank], as in peft; those of one Megatron matrix are computed together.

Where tensor-parallel ranks divide W's rows, they divide B's, and A is whole on each; where they divide W's columns,
they divide A's, and B is whole. Rows of a micro-batch are shared as the layer shares them, so that only A x is
exchanged.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch.nn.functional import pad

from async_rl.config.adapter_section import AdapterSection


@dataclass(frozen=True, slots=True)
class Matrix:
    """One Hugging Face matrix [outputs, inputs] within a Megatron matrix: the name of its layer, the rows and columns
    that this rank has, and whether it is targeted."""

    layer: str
    shape: tuple[int, int]
    rows: slice
    columns: slice
    is_targeted: bool

    @property
    def name(self) -> str:
        return self.layer.rpartition(".")[2]


class Adapter(torch.nn.Module):
    """This rank's part of the adapter of one Megatron matrix.

    The factors are float32 whatever the model's dtype, in which products are computed; `a` and `b` have them by the
    names of the Hugging Face layers, such as "q_proj".

    Args:
        matrices: what the matrix holds, at least one of them targeted; `merge` composes it of their rows.
        by_columns: tensor-parallel ranks divide the columns, not the rows.
        shares_rows: those ranks have each some of a micro-batch's rows.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        merge: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        section: AdapterSection,
        *,
        by_columns: bool,
        shares_rows: bool,
    ) -> None:
        super().__init__()
        assert section.rank is not None, "no adapters are asked for"
        self.is_on = True
        self.last_merge: torch.Tensor | None = None
        """Of this rank in its last publish, int64 [3]: (changed values, values, whether B is not 0)."""
        self.whole: dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
        """id(factor) -> (name, shape of the whole factor, where this rank's part begins)."""
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        self._num_rows = {matrix.name: matrix.rows.stop - matrix.rows.start for matrix in matrices}
        self._merge = merge
        self.scale = section.scale
        self._by_columns, self._shares_rows = by_columns, shares_rows
        for matrix in (each for each in matrices if each.is_targeted):
            (outputs, inputs), name = matrix.shape, matrix.name
            a = _first_a(matrix.layer, section.rank, inputs)[:, matrix.columns]
            self.a[name] = torch.nn.Parameter(a.contiguous())
            self.b[name] = torch.nn.Parameter(torch.zeros(self._num_rows[name], section.rank))
            self.whole[id(self.a[name])] = (f"{matrix.layer}.lora_A", (section.rank, inputs), (0, matrix.columns.start))
            self.whole[id(self.b[name])] = (f"{matrix.layer}.lora_B", (outputs, section.rank), (matrix.rows.start, 0))
        for factors, is_divided, dim in ((self.a, by_columns, 1), (self.b, not by_columns, 0)):
            for factor in factors.values():
                if is_divided:
                    set_tensor_model_parallel_attributes(factor, True, dim, 1)
                # Each rank's gradient of a whole factor is that of its own rows: Megatron sums them.
                factor.sequence_parallel = shares_rows and not is_divided

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output for its input, [..., inputs] -> [..., outputs] of this rank."""
        inner = x @ torch.cat(list(self.a.values())).to(x.dtype).T
        if self._shares_rows:
            if self._by_columns:
                inner = reduce_scatter_to_sequence_parallel_region(inner)
            else:
                inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
        out: torch.Tensor = inner @ (self._outer() * self.scale).to(x.dtype).T
        return out

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """The matrix that the layer and its adapter are together: rounded once, from float32 or wider."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            change = self._outer().to(wide) @ torch.cat(list(self.a.values())).to(wide)
            merged = torch.add(weight.to(wide), change, alpha=self.scale).to(weight.dtype)
            has_update = torch.stack([factor.any() for factor in self.b.values()]).any()
            num_values = torch.tensor(merged.numel(), device=merged.device)
            self.last_merge = torch.stack([(merged != weight).sum(), num_values, has_update.long()])
            return merged

    def _outer(self) -> torch.Tensor:
        """The factors B of all layers as one, [outputs of this rank, their ranks], 0 where a row is another layer's."""
        names, any_b = list(self.b), next(iter(self.b.values()))
        rank = any_b.shape[1]
        parts = []
        for name, num_rows in self._num_rows.items():
            if name in self.b:
                before = names.index(name) * rank
                parts.append(pad(self.b[name], (before, (len(names) - 1) * rank - before)))
            else:
                parts.append(any_b.new_zeros(num_rows, len(names) * rank))
        return self._merge(parts)


def adapters_of(model: torch.nn.Module) -> dict[str, Adapter]:
    """All adapters of a rank's model, by the names of the matrices beside which they are."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    return {f"{name.removesuffix('.adapter')}.weight": adapter for name, adapter in found.items()}


def rounded_away(model: torch.nn.Module) -> tuple[int, int]:
    """Of this rank's matrices with an update: those that the last merge left as they were, bit for bit, and all."""
    merges = [each.last_merge for each in adapters_of(model).values() if each.last_merge is not None]
    updated = [changed for changed, _, has_update in map(torch.Tensor.tolist, merges) if has_update]
    return updated.count(0), len(updated)


def base_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters by name, without those of adapters."""
    return {name: parameter for name, parameter in model.named_parameters() if ".adapter." not in name}


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context the model is the base, bit for bit."""
    adapters = adapters_of(model).values()
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def add_output(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, Any]) -> Any:
    """A forward hook of Megatron's linear layers, which return (output, bias or None)."""
    adapter: Adapter = layer.adapter  # type: ignore[assignment]
    out, bias = outputs
    return (out + adapter(inputs[0]), bias) if adapter.is_on else outputs


def _first_a(layer: str, rank: int, inputs: int) -> torch.Tensor:
    """A new factor A, [rank, inputs]; the same on all ranks, whose torch has the run's seed."""
    digest = hashlib.sha256(f"{torch.initial_seed()} {layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    a = torch.empty(rank, inputs)
    return torch.nn.init.kaiming_uniform_(a, a=sqrt(5), generator=generator)
