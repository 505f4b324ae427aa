"""The policy's adapters as a stream of whole factors on the main rank, the form in which they are published alone.

The ranks that have parts of a Megatron matrix, those of its stage in the first replica, send their parts of all of its
factors in one message to the main rank, which puts them together.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from async_rl.config.adapter_section import AdapterSection
from async_rl.shared.protocol.adapter import A, B, factor_name
from async_rl.shared.weights.fingerprint import TensorSpec
from trainer.hf.adapters import has_adapter
from trainer.hf.weight_export import MAIN_RANK
from trainer.hf.weight_map import Layout, WeightEntry, weight_map
from trainer.model.adapters import adapters_of
from trainer.model.gpt import RankModel


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of a factor."""

    spec: TensorSpec
    at: tuple[slice, slice]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.at
        return rows.stop - rows.start, columns.stop - columns.start


class AdapterExport:
    """Created identically on every rank; a stream reads the factors as they are, and is a collective: while the main
    rank iterates over `stream()`, each other rank calls `serve()` once."""

    def __init__(self, model: RankModel, section: AdapterSection) -> None:
        self._parallel = parallel = model.parallel
        self._adapters = adapters_of(model)
        self._rank = section.rank or 0
        self._targets_layer = section.targets_layer
        self._num_stage_ranks = parallel.num_ranks // parallel.pp_size
        entries = weight_map(model.shape, Layout.of(parallel))
        self._entries = [entry for entry in entries if has_adapter(entry, section)]

    @property
    def specs(self) -> list[TensorSpec]:
        """The factors in the order of the stream, on every rank; all are float32."""
        return [part.spec for entry in self._entries for part in self._parts(entry, 0)]

    def stream(self) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        """Main rank: yields (spec, factor) of every factor, whole, on the model's device.

        A stream that is closed early still receives the rest: each of the other ranks is in `serve`.
        """
        entries = iter(self._entries)
        try:
            for entry in entries:
                yield from self._collect(entry)
        except GeneratorExit:
            for entry in entries:
                self._collect(entry)
            raise

    def serve(self) -> None:
        """Any other rank: sends its parts; returns after the last one."""
        for entry in self._entries:
            if self._parallel.rank in self._ranks(entry):
                dist.send(torch.cat([factor.flatten() for factor in self._own(entry)]), MAIN_RANK)

    def _collect(self, entry: WeightEntry) -> list[tuple[TensorSpec, torch.Tensor]]:
        """The main rank's side of one matrix."""
        ranks = self._ranks(entry)
        if ranks == range(MAIN_RANK, MAIN_RANK + 1):
            return list(zip((part.spec for part in self._parts(entry, 0)), self._own(entry), strict=True))
        device = self._parallel.device.DEVICE
        whole = {part.spec: torch.empty(part.spec.shape, device=device) for part in self._parts(entry, 0)}
        for tp_rank, rank in enumerate(ranks):
            parts = list(self._parts(entry, tp_rank))
            if rank == MAIN_RANK:
                factors = self._own(entry)
            else:
                sizes = [prod(part.shape) for part in parts]
                flat = torch.empty(sum(sizes), device=device)
                dist.recv(flat, rank)
                factors = [each.view(part.shape) for each, part in zip(flat.split(sizes), parts, strict=True)]
            for part, factor in zip(parts, factors, strict=True):
                whole[part.spec][part.at].copy_(factor)
        return list(whole.items())

    def _own(self, entry: WeightEntry) -> list[torch.Tensor]:
        """This rank's parts, in the order of `_parts`."""
        adapter = self._adapters[entry.megatron_name]
        return [factors[name].detach() for name in adapter.a for factors in (adapter.a, adapter.b)]

    def _parts(self, entry: WeightEntry, tp_rank: int) -> Iterator[_Part]:
        """What a tensor-parallel rank has: A and B of each targeted layer. A part that is not divided is whole."""
        shards = entry.shards(tp_rank, self._parallel.tp_size)
        for (name, (outputs, inputs)), shard in zip(entry.hf_shapes.items(), shards, strict=True):
            if self._targets_layer(name):
                ((rows, columns),) = shard.slices
                layer, of_rank = name.removesuffix(".weight"), slice(0, self._rank)
                yield _Part(TensorSpec(factor_name(layer, A), "float32", (self._rank, inputs)), (of_rank, columns))
                yield _Part(TensorSpec(factor_name(layer, B), "float32", (outputs, self._rank)), (rows, of_rank))

    def _ranks(self, entry: WeightEntry) -> range:
        """Those that have parts, in order of their tensor-parallel ranks."""
        first = entry.stage * self._num_stage_ranks
        return range(first, first + self._parallel.tp_size)
