"""The policy as a stream of whole Hugging Face tensors on the main rank, the form in which it is published and saved.

With model parallelism the stream is sent parcel by parcel: consecutive tensors of one owner, at most `bucket_bytes` or
a single parameter. The owner is the first tensor-parallel rank of the stage that has a layer, or the rank that has an
expert. The stage's other tensor-parallel ranks send it their parts, or of a tensor of all experts the other
expert-parallel ranks; it assembles the whole tensors and sends them to the main rank. Only the first replica, and the
first ranks that hold all experts, take part. Each rank holds at most one parcel besides its own weights, plus the one
that the consumer of the stream still holds.

By stage, the first rank of each pipeline stage takes the main rank's place for the stage's own tensors, but for the
experts of ranks that give it no parts of these: such a rank sends them itself, and waits for nobody.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from async_rl.shared.weights.fingerprint import TensorSpec
from trainer.hf.weight_map import Layout, WeightEntry, weight_map
from trainer.model.adapters import adapters_of, base_parameters
from trainer.model.gpt import RankModel

MAIN_RANK = 0
PARCEL_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Parcel:
    """Entries that travel in one message from rank `owner` to the rank that sends them, and their tensors, in stream
    order."""

    owner: int
    stage: int
    entries: tuple[WeightEntry, ...]
    specs: tuple[TensorSpec, ...]


class WeightExport:
    """Created identically on every rank; a stream reads the current weights; its tensors are valid until the next step.

    A stream is a collective: while the main rank iterates over `stream()`, each other rank calls `serve()` once.
    """

    def __init__(self, model: RankModel, bucket_bytes: int = PARCEL_BYTES, *, merges: bool = True) -> None:
        """`merges`: each matrix with an adapter is what both are together; otherwise without."""
        self.shape = model.shape
        self._parallel = parallel = model.parallel
        self._parameters, self._adapters = base_parameters(model), adapters_of(model) if merges else {}
        any_parameter = next(iter(self._parameters.values()))
        self._dtype, self._device = any_parameter.dtype, any_parameter.device
        assert all(p.dtype == self._dtype for p in self._parameters.values()), "a parcel has tensors of one dtype"
        self._num_stage_ranks = parallel.num_ranks // parallel.pp_size
        self._parcels = list(self._cut(weight_map(model.shape, Layout.of(parallel)), bucket_bytes))

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors of the stream, in its order, on every rank."""
        return [spec for parcel in self._parcels for spec in parcel.specs]

    @property
    def senders(self) -> list[int]:
        """The ranks that send their own tensors by stage, the main rank first; the same on every rank."""
        return sorted({self._target(parcel, by_stage=True) for parcel in self._parcels})

    @property
    def sender_of_each(self) -> list[int]:
        """The number among `senders` of the one that sends each tensor, on every rank."""
        number_of = {rank: number for number, rank in enumerate(self.senders)}
        return [number_of[self._target(parcel, by_stage=True)] for parcel in self._parcels for _ in parcel.specs]

    @property
    def is_sender(self) -> bool:
        """Whether this rank is one of `senders`."""
        return self._parallel.rank in self.senders

    def stream(self, *, by_stage: bool = False) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        """Main rank: yields (spec, tensor) of every tensor, assembled, on the model's device; by stage, each sender: of
        those that it sends.

        A tensor is a view of the model's own weights where these are not divided. A stream that is closed early still
        receives the remaining parcels: each of the other ranks is in `serve`, and must not be left there.
        """
        parcels = iter([p for p in self._parcels if self._target(p, by_stage=by_stage) == self._parallel.rank])
        try:
            for parcel in parcels:
                yield from zip(parcel.specs, self._collect(parcel), strict=True)
        except GeneratorExit:
            for parcel in parcels:
                self._collect(parcel)
            raise

    def serve(self, *, by_stage: bool = False) -> None:
        """Any other rank: sends its parts of one stream; returns after the stream's last tensor."""
        for parcel in self._parcels:
            self._give(parcel, self._target(parcel, by_stage=by_stage))

    def _target(self, parcel: Parcel, *, by_stage: bool) -> int:
        """The rank that a parcel is for."""
        if not by_stage:
            return MAIN_RANK
        head = parcel.stage * self._num_stage_ranks
        # The first tensor-parallel ranks give the head their parts while it sends: it would wait for one that sends.
        return parcel.owner if parcel.owner - head >= self._parallel.tp_size else head

    def _give(self, parcel: Parcel, target: int) -> None:
        """Another rank's side of one parcel; its buffers are freed before the next parcel's are allocated."""
        if parcel.owner == self._parallel.rank:
            dist.send(self._whole(parcel)[0], target)
        elif self._parallel.rank in self._helpers(parcel):
            dist.send(self._own_part(parcel), parcel.owner)

    def _collect(self, parcel: Parcel) -> list[torch.Tensor]:
        """The side of the rank that a parcel is for: its tensors."""
        if parcel.owner != self._parallel.rank:
            flat, tensors = self._empty(parcel)
            dist.recv(flat, parcel.owner)
            return tensors
        if not self._helpers(parcel):
            return [tensor for entry in parcel.entries for tensor in self._own_tensors(entry)]
        return self._whole(parcel)[1]

    def _whole(self, parcel: Parcel) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The owner's side: (the whole parcel, [elements]; its tensors, views of it)."""
        flat, tensors = self._empty(parcel)
        whole = iter(tensors)
        targets = [(entry, [next(whole) for _ in entry.hf_shapes]) for entry in parcel.entries]
        for entry, wholes in targets:
            self._place(entry, wholes, self._own_tensors(entry), 0)
        for rank, helper in enumerate(self._helpers(parcel), start=1):
            part = self._own_part(parcel, receive_from=helper)
            start = 0
            for entry, wholes in targets:
                if entry.divided is not None:
                    own = entry.of(self._parameters)
                    theirs = part[start : start + own.numel()].view(own.shape)
                    start += own.numel()
                    self._place(entry, wholes, entry.on(rank).fusion.split(theirs), rank)
        return flat, tensors

    def _place(self, entry: WeightEntry, wholes: list[torch.Tensor], parts: list[torch.Tensor], rank: int) -> None:
        shards = entry.shards(rank, entry.share_of(self._parallel)[1])
        for whole, part, shard in zip(wholes, parts, shards, strict=True):
            shard.put(part, whole)

    def _own_tensors(self, entry: WeightEntry) -> list[torch.Tensor]:
        return entry.on(self._parallel.tp_rank).fusion.split(self._value(entry))

    def _own_part(self, parcel: Parcel, receive_from: int | None = None) -> torch.Tensor:
        """A tensor-parallel rank's contribution to a parcel: its part of every divided parameter, [elements]."""
        divided = [entry for entry in parcel.entries if entry.divided is not None]
        num_values = sum(entry.of(self._parameters).numel() for entry in divided)
        part = torch.empty(num_values, dtype=self._dtype, device=self._device)
        if receive_from is not None:
            dist.recv(part, receive_from)
        else:
            torch.cat([self._value(entry).view(-1) for entry in divided], out=part)
        return part

    def _value(self, entry: WeightEntry) -> torch.Tensor:
        """This rank's part of a parameter, with its adapter if it has one that is merged."""
        own, adapter = entry.of(self._parameters).detach(), self._adapters.get(entry.megatron_name)
        return own if adapter is None else adapter.merged(own)

    def _empty(self, parcel: Parcel) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sizes = [prod(spec.shape) for spec in parcel.specs]
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        return flat, [t.view(spec.shape) for t, spec in zip(flat.split(sizes), parcel.specs, strict=True)]

    def _helpers(self, parcel: Parcel) -> range:
        """The ranks whose parts the owner needs, in order of their numbers among those that divide it, from 1."""
        divided = any(entry.divided is not None for entry in parcel.entries)
        num_ranks = parcel.entries[0].share_of(self._parallel)[1] if divided else 1
        return range(parcel.owner + 1, parcel.owner + num_ranks)

    def _cut(self, entries: Iterable[WeightEntry], bucket_bytes: int) -> Iterator[Parcel]:
        """Consecutive entries of one owner, and of one kind of ranks that divide them, cut where they would exceed
        `bucket_bytes`."""
        run: list[WeightEntry] = []
        size = 0
        for entry in entries:
            num_bytes = sum(map(prod, entry.hf_shapes.values())) * self._dtype.itemsize
            of_others = run and (self._owner(entry), entry.has_experts) != (self._owner(run[0]), run[0].has_experts)
            if run and (size + num_bytes > bucket_bytes or of_others):
                yield self._parcel(run)
                run, size = [], 0
            run.append(entry)
            size += num_bytes
        yield self._parcel(run)

    def _parcel(self, entries: Sequence[WeightEntry]) -> Parcel:
        dtype_name = str(self._dtype).removeprefix("torch.")
        specs = [TensorSpec(name, dtype_name, shape) for e in entries for name, shape in e.hf_shapes.items()]
        return Parcel(self._owner(entries[0]), entries[0].stage, tuple(entries), tuple(specs))

    def _owner(self, entry: WeightEntry) -> int:
        """The first rank of the stage, or the first rank that has the expert."""
        return entry.stage * self._num_stage_ranks + (entry.ep_rank or 0)
