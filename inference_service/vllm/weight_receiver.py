"""Handles a weight stream in a vLLM worker: joins the trainer's group, receives, and feeds the model's loader.

The adapters of `weight_adapters.py` call it; nothing here needs vLLM.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import torch

from async_rl.shared.protocol.inference import InitInfo, UpdateInfo
from async_rl.shared.weights.stream import TensorSpec
from inference_service.engine_interface import RequestRefused
from inference_service.weight_transfer.receiver import WeightReceiver

NamedTensors = list[tuple[str, torch.Tensor]]
LoadWeights = Callable[[NamedTensors], object]

BATCH_BYTES = 256 * 2**20
"""Maximum size of a batch passed to the loader, unless a single tensor is larger."""

_LAYER = re.compile(r"^.*?\.\d+\.")


class WorkerReceiver:
    """The receiving end of one worker. `worker_rank` numbers all workers of the instance, also data-parallel ones."""

    def __init__(self, worker_rank: int) -> None:
        self._worker_rank = worker_rank
        self._receiver = WeightReceiver()

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the last stream that was received completely."""
        return self._receiver.fingerprint

    def join(self, info: InitInfo) -> None:
        """Joins the group `info` names, with this worker's own rank.

        Raises:
            PublishError: the rendezvous did not complete within `info.timeout_s`.
        """
        self._receiver.join(info.model_copy(update={"rank_offset": info.rank_offset + self._worker_rank}))

    def load(self, update: UpdateInfo, load_weights: LoadWeights) -> None:
        """Receives the announced tensors and passes them on, at most a layer at a time.

        After an error during the transfer the group is left, because its members no longer agree on the position in the
        stream: join a new one and send the whole stream again.

        Raises:
            RequestRefused: the announcement contradicts itself; nothing was received.
            PublishError: there is no group or snapshot to read from, or the transfer failed.
        """
        specs = announced_specs(update)
        try:
            with closing(self._receiver.stream(update, specs)) as stream:
                for batch in in_batches(stream):
                    load_weights(batch)
        except Exception:
            self._receiver.leave()
            raise

    def leave(self) -> None:
        """Closes the group, if there is one."""
        self._receiver.leave()


def announced_specs(update: UpdateInfo) -> list[TensorSpec]:
    """The tensors of an announcement. Whether the model has them is checked by vLLM, which fuses and renames weights.

    Raises:
        RequestRefused: the lists differ in length, a name occurs twice, or torch has no such dtype.
    """
    lengths = (len(update.names), len(update.dtype_names), len(update.shapes))
    if len(set(lengths)) != 1:
        raise RequestRefused(
            f"update_info.names, dtype_names and shapes have {lengths} entries: expected equal lengths", "update_info"
        )
    if len(set(update.names)) != len(update.names):
        twice = next(name for name in update.names if update.names.count(name) > 1)
        raise RequestRefused(f"weight {twice!r} is announced twice: send every tensor once", "update_info.names")
    for name, dtype_name in zip(update.names, update.dtype_names, strict=True):
        if not isinstance(getattr(torch, dtype_name, None), torch.dtype):
            raise RequestRefused(
                f"weight {name!r} has dtype {dtype_name!r}: expected the name of a torch dtype, such as 'bfloat16'",
                "update_info.dtype_names",
            )
    return [
        TensorSpec(name, dtype_name, tuple(shape))
        for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True)
    ]


def in_batches(
    stream: Iterable[tuple[TensorSpec, torch.Tensor]], max_bytes: int = BATCH_BYTES
) -> Iterator[NamedTensors]:
    """Cuts the stream where a layer ends, and within a layer before it exceeds `max_bytes`.

    vLLM finishes a module once all its tensors have arrived, and keeps them until then.
    """
    batch: NamedTensors = []
    size, layer = 0, ""
    for spec, tensor in stream:
        found = _LAYER.match(spec.name)
        this_layer = found[0] if found else ""
        if batch and (this_layer != layer or size + spec.num_bytes > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append((spec.name, tensor))
        size += spec.num_bytes
        layer = this_layer
    if batch:
        yield batch
