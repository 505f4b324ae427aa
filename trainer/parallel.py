"""Process groups of the training ranks, and small JSON messages between them.

Ranks form `num_replicas` replicas of the model; the ranks of one replica share its tensors (tensor parallel), the rows
of its micro-batches (context parallel) and its layers (pipeline parallel). Experts are spread over `expert` consecutive
ranks of a pipeline stage, first within a replica and then across neighbouring replicas. Ranks are numbered as in
Megatron: tensor first, then context, then replicas, then pipeline stages.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.shared.net.local_address import (
    address_for_others,
    address_towards,
    choose_interface_towards,
    is_loopback,
    own_loopback,
)
from trainer.devices import Device
from trainer.gloo_device import forget_device, share_device

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for another rank: long enough for the slowest rollout of a batch and its training."""

CPU = torch.device("cpu")

MEETS_TO_CLOSE = torch.__version__ < "2.9"  # compared as versions, not as text
"""Whether ranks wait for each other before they end their groups. With torch 2.7.1 a group is destroyed under Python's
lock; a thread of gloo that drops a Python tensor of its last operation needs that lock too, and both hang.
Remove it once the oldest torch of pyproject.toml is 2.9."""

CLOSE_TIMEOUT = timedelta(seconds=10)
"""Time limit of that wait; a rank that has failed does not take part."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's position among the training ranks.

    `dp_rank` of `num_replicas` is its data-parallel rank; `*_rank` of `*_size` are its positions along the other axes.
    """

    device: Device
    rank: int
    num_ranks: int
    dp_rank: int
    num_replicas: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    ep_rank: int
    ep_size: int
    replica: dist.ProcessGroup
    """All ranks of this replica, its leader first."""
    expert_peers: dist.ProcessGroup
    """All ranks of the replicas that share experts with this replica, including its own."""
    num_chunks: int = 1
    """Parts of the model on each rank of a pipeline, Megatron's virtual stages: the ranks take turns part by part."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes and publishes."""
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        """Whether it produces its replica's rollouts; the replica's other ranks receive their groups from it."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0

    @property
    def reports(self) -> bool:
        """Whether it reports for its replica: one of its ranks with log-probs does."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.is_last_stage

    @property
    def shares_gradients(self) -> bool:
        """Whether other ranks have the same weights and add to their gradients: they share the optimizer's state."""
        return self.num_replicas * self.cp_size > 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the output layer, and so log-probs and losses."""
        return self.pp_rank == self.pp_size - 1

    @property
    def experts_span_replicas(self) -> bool:
        """Whether replicas exchange tokens in every layer and must therefore run the same passes.

        The ranks of one stage in a replica hold all experts, once or several times, only if `ep_size` divides their
        number.
        """
        return self.tp_size * self.cp_size % self.ep_size != 0

    def most_among_expert_peers(self, *counts: int) -> list[int]:
        """The maximum of each count over the replicas that share experts with this one.

        If no experts span replicas, these are the counts themselves. Otherwise it waits until all ranks of the replicas
        that share experts with this one call it; other replicas are not involved.
        """
        if self.experts_span_replicas:
            most = torch.tensor(counts)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.expert_peers)
            return most.tolist()
        return list(counts)

    def gather_json(self, obj: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's `obj`, in order of ranks, on all ranks; `group` is another one of all ranks.

        Waits until all ranks call it. Objects must be JSON-serializable; tuples become lists.
        """
        data = _encode(obj)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=group)
        return [_decode(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def broadcast_json(self, obj: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
        """Rank `src`'s `obj` on every rank, or on those of `group`; the `obj` of other ranks is ignored.

        Waits until all of these ranks call it. The source also gets its object as decoded from JSON.
        """
        data = _encode(obj)
        length = torch.tensor([len(data)])
        dist.broadcast(length, src, group=group)
        if self.rank != src:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src, group=group)
        return _decode(data)

    def close(self) -> None:
        """Destroys the process groups; the process can create new ones afterwards."""
        if MEETS_TO_CLOSE:
            # Both names keep their objects until the groups are destroyed, so that gloo drops no Python tensor then.
            tensor = torch.zeros(1)
            work = dist.all_reduce(tensor, async_op=True)
            with suppress(RuntimeError):
                work.wait(CLOSE_TIMEOUT)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        forget_device()


def init_parallel(device: Device, seed: int, section: TrainerSection) -> Parallel:
    """Joins torchrun's process group, or a group of this process alone if torchrun did not start it.

    Also creates Megatron's process groups and seeds its random states. Waits for all ranks that torchrun started.

    Raises:
        ConfigError: the ranks cannot be divided as `section` requires.
    """
    # Every group needs both kinds of tensors: model tensors on the device, messages on the host.
    backend = device.BACKEND if device.BACKEND == "gloo" else f"cpu:gloo,{device.DEVICE.type}:{device.BACKEND}"
    share_device()
    if dist.is_torchelastic_launched():
        _choose_interface(device.BACKEND)
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    section.num_replicas(dist.get_world_size())
    num_chunks = section.virtual_pipeline_parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=section.tensor_parallel,
        pipeline_model_parallel_size=section.pipeline_parallel,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        context_parallel_size=section.context_parallel,
        expert_model_parallel_size=section.expert_parallel,
        # Experts are not divided.
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    replica = _make_groups(section.ranks_per_replica // section.pipeline_parallel, section)
    return Parallel(
        device=device,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        num_replicas=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=section.tensor_parallel,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=section.context_parallel,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=section.pipeline_parallel,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=section.expert_parallel,
        replica=replica,
        expert_peers=_expert_peers(section, replica),
        num_chunks=num_chunks,
    )


def address_for_ranks() -> str:
    """The address of this host at which all training ranks reach it: loopback where they are all here.

    Raises:
        ConfigError: there is no route to the other hosts.
    """
    if _are_on_this_host():
        return own_loopback()
    with _routed():
        address = address_towards(os.environ["MASTER_ADDR"])
    # A host's own name may mean loopback there.
    return address_for_others() if is_loopback(address) else address


def _are_on_this_host() -> bool:
    # Without torchrun this process is the only one.
    num_ranks = os.environ.get("WORLD_SIZE")
    return os.environ.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks


def _choose_interface(backend: str) -> None:
    """Ranks on several hosts use the network of the rendezvous; torchrun tells its ranks where that is."""
    if not _are_on_this_host():
        with _routed():
            choose_interface_towards(os.environ["MASTER_ADDR"], backend)


@contextmanager
def _routed() -> Iterator[None]:
    """In its body, that no route leads to the rendezvous is a named error."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {os.environ['MASTER_ADDR']!r}, to which this host has no route: {error}; give torchrun an "
            "address of the first training host as --master-addr"
        ) from error


def _expert_peers(section: TrainerSection, replica: dist.ProcessGroup) -> dist.ProcessGroup:
    """Expert groups and replicas are both runs of consecutive ranks of a stage. They overlap up to the next rank at
    which both begin."""
    of_replica = section.ranks_per_replica // section.pipeline_parallel
    overlap = math.lcm(of_replica, section.expert_parallel)
    return replica if overlap == of_replica else _make_groups(overlap, section)


def _make_groups(run: int, section: TrainerSection) -> dist.ProcessGroup:
    """Creates the groups of all ranks, in the same order on each, and returns this rank's own: `run` consecutive ranks
    of a stage with those of the other stages."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    num_stage_ranks = num_ranks // section.pipeline_parallel
    for start in range(0, num_stage_ranks, run):
        stages = range(start, num_ranks, num_stage_ranks)
        ranks = [first + i for first in stages for i in range(run)]
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=TIMEOUT)
        if rank in ranks:
            own = group
    return own


def _encode(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
