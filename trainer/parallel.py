"""Process groups of the training ranks, and small JSON messages between the data-parallel ones.

Every rank is a whole replica of the model as yet (TP = PP = 1).
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from trainer.devices import Device


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place among the training ranks.

    `replica` of `num_replicas` is its data-parallel rank. `is_main` holds for the one rank that writes and publishes.
    """

    device: Device
    replica: int
    num_replicas: int

    @property
    def is_main(self) -> bool:
        return self.replica == 0

    def gather_json(self, obj: Any) -> list[Any]:
        """Every replica's `obj`, in order of replicas, on all of them.

        Waits until all replicas call it. Objects are what JSON can carry; tuples come back as lists.
        """
        data = _encode(obj, self.device)
        group = parallel_state.get_data_parallel_group()
        sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(self.num_replicas)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=data.device), group=group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=data.device)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=group)
        return [_decode(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def broadcast_json(self, obj: Any, src: int = 0) -> Any:
        """Replica `src`'s `obj` on every replica; the others' `obj` is ignored.

        Waits until all replicas call it. The source gets it back as JSON carried it, too.
        """
        data = _encode(obj, self.device)
        group = parallel_state.get_data_parallel_group()
        source = dist.get_global_rank(group, src)
        length = torch.tensor([len(data)], device=data.device)
        dist.broadcast(length, source, group=group)
        if self.replica != src:
            data = torch.empty(int(length), dtype=torch.uint8, device=data.device)
        dist.broadcast(data, source, group=group)
        return _decode(data)

    def close(self) -> None:
        """Ends the process groups; the process can open new ones afterwards."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def init_parallel(device: Device, seed: int) -> Parallel:
    """Joins torchrun's process group, or a group of this process alone where torchrun did not start it.

    Also makes Megatron's process groups and seeds its random states. Waits for all ranks that torchrun started.
    """
    if dist.is_torchelastic_launched():
        dist.init_process_group(device.BACKEND)
    else:
        dist.init_process_group(device.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Parallel(device, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())


def _encode(obj: Any, device: Device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8).to(device.DEVICE)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())
