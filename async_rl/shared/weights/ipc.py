"""The hand-over of weights between processes on one host, from device memory to device memory, for `WeightGroup`.

It stands in for a process group, since nccl and hccl refuse two ranks on one device. Rank 0 owns two buffers, which all
other ranks have mapped: by an IPC handle of the device, on the CPU by a file without a name. Messages pass through the
buffers in pieces: rank 0 fills one and says in the group's store that it is ready; each receiver copies from it and
acknowledges; only then is it filled again. It has not run on a GPU or NPU.
"""

import fcntl
import os
import re
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Base64Bytes, Field, ValidationError

from async_rl.errors import PublishError
from async_rl.shared.protocol.body import StrictBody
from async_rl.shared.weights.collectives import DEVICES, MemberFailed
from async_rl.shared.weights.store import ENDED, RendezvousStore, lost_key

PIECE_BYTES = 64 * 2**20
"""Of each of the two buffers: so large that the words in the store, about a millisecond a piece, do not count."""

RECEIVER_TIMEOUTS = 2
"""How many timeouts a receiver waits for a piece: more than the sender, who knows which rank did not acknowledge."""

LOOK_S = 0.1
"""How often the sender looks whether a receiver was lost."""

FILE_NAME = "async-rl-weights"

RECORD = "ipc/record"


def _is_plain_name(name: bytes) -> bytes:
    if not re.fullmatch(rb"/?[\w.-]{1,255}", name):
        raise ValueError(f"{name!r} is not the name of a file of shared memory")
    return name


class HostMemory(StrictBody):
    """A file without a name that process `pid` has open: it ends with the last process that has it mapped."""

    kind: Literal["cpu"]
    pid: int = Field(ge=1)
    fd: int = Field(ge=0)


class DeviceMemory(StrictBody):
    """The device by its name (`_name_of`), and what `UntypedStorage._share_cuda_` or `_share_npu_` return after it."""

    kind: Literal["cuda", "npu"]
    device: str = Field(min_length=1, max_length=256)
    handle: Annotated[Base64Bytes, Field(min_length=1, max_length=4096)]
    num_bytes: int = Field(ge=2)
    offset_bytes: int = Field(ge=0)
    ref_counter: Annotated[Base64Bytes, AfterValidator(_is_plain_name)]
    ref_counter_offset: int = Field(ge=0)
    event: Annotated[Base64Bytes, Field(max_length=4096)]
    event_sync_required: bool


SHARED_FIELDS = tuple(DeviceMemory.model_fields)[2:]


class Record(StrictBody):
    """How a receiver maps the sender's buffers, and the bytes at their beginning by which it knows them."""

    boot_id: str = Field(max_length=256)
    piece_bytes: int = Field(ge=1, le=2**40)
    token: Annotated[Base64Bytes, Field(min_length=16, max_length=16)]
    memory: HostMemory | DeviceMemory = Field(discriminator="kind")


def ipc_backend(backend: str) -> str:
    """The name of this hand-over between devices of the kind that `backend` connects."""
    return f"{DEVICES[backend]}_ipc"


class HandOver:
    """The collectives of one rank, as `collectives.Collectives`: what a lost or silent rank costs is an error in time.

    A receiver's `broadcast` returns when the data has arrived, the sender's when the last piece is in a buffer.
    """

    def __init__(
        self, store: RendezvousStore, rank: int, world_size: int, timeout_s: float, device: torch.device
    ) -> None:
        """Returns when all receivers have mapped the buffers; its tensors are on `device`.

        Raises:
            RuntimeError, PublishError: one of them cannot, or did not within the timeout.
        """
        self.device = device
        self._store = store
        self._rank = rank
        self._receivers = range(1, world_size)
        self._timeout_s = timeout_s
        self._number = 0
        """Of the last piece. In the place of piece 0 the receivers acknowledge that they have the buffers."""
        self._num_acknowledged = 0
        self._buffers: torch.Tensor | None = None
        if rank == 0:
            self._offer()
        else:
            self._buffers = _map_buffers(store.get(RECORD), device)
            store.set(_acknowledged(0, rank), "")

    def broadcast(self, data: torch.Tensor) -> int:
        """Passes `data`, uint8 [num_bytes] on the group's device, from rank 0 to all; returns the work for `wait`.

        Raises:
            RuntimeError, PublishError: the group is broken or closed.
            MemberFailed: a receiver was lost, did not acknowledge a piece in time, or did before it was there.
        """
        if self._buffers is None:
            raise RuntimeError("the group is closed")
        halves = self._buffers.view(2, -1)
        for piece in data.split(halves.shape[1]) if data.numel() else ():
            self._number += 1
            buffer = halves[self._number % 2, : piece.numel()]
            if self._rank == 0:
                # All have to have copied what the buffer holds.
                self.wait(self._number - 2)
                self._require_unacknowledged(self._number)
                buffer.copy_(piece)
                _finish_copies(self.device)
                self._store.set(_ready(self._number), "")
            else:
                self._store.wait([_ready(self._number)], timedelta(seconds=RECEIVER_TIMEOUTS * self._timeout_s))
                piece.copy_(buffer)
                _finish_copies(self.device)
                self._store.set(_acknowledged(self._number, self._rank), "")
        return self._number

    def wait(self, work: int) -> None:
        """Sender: returns when all receivers have copied what that broadcast sent; receiver: at once.

        Raises:
            RuntimeError: the group has ended.
            MemberFailed: a receiver was lost, or did not acknowledge a piece in time.
        """
        while self._rank == 0 and self._num_acknowledged <= work:
            self._await_all(self._num_acknowledged)
            self._num_acknowledged += 1

    def close(self) -> None:
        """Unmaps the buffers; a second call does nothing."""
        self._buffers = None

    def _offer(self) -> None:
        token, num_bytes = secrets.token_bytes(16), 2 * PIECE_BYTES
        memory: HostMemory | DeviceMemory
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        file = os.memfd_create(FILE_NAME, flags) if self.device.type == "cpu" else None
        try:
            if file is None:
                self._buffers, memory = _exported(self.device, num_bytes)
            else:
                os.ftruncate(file, num_bytes)
                # Whoever shortened it would end this process by a signal.
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                self._buffers, memory = _mapped_file(file, num_bytes), HostMemory(kind="cpu", pid=os.getpid(), fd=file)
            self._buffers[: len(token)].copy_(torch.tensor(list(token), dtype=torch.uint8))
            _finish_copies(self.device)
            # Validation is for what was encoded.
            record = Record.model_construct(boot_id=_boot_id(), piece_bytes=PIECE_BYTES, token=token, memory=memory)
            self._store.set(RECORD, record.model_dump_json())
            self.wait(0)
        finally:
            if file is not None:
                os.close(file)

    def _require_unacknowledged(self, number: int) -> None:
        if early := [rank for rank in self._receivers if self._store.check([_acknowledged(number, rank)])]:
            raise MemberFailed(early[0], f"acknowledged piece {number} before it was there")

    def _await_all(self, number: int) -> None:
        keys = {rank: _acknowledged(number, rank) for rank in self._receivers}
        deadline = time.monotonic() + self._timeout_s
        while missing := [rank for rank, key in keys.items() if not self._store.check([key])]:
            if self._store.has_ended():
                raise RuntimeError(ENDED)
            if lost := [rank for rank in missing if self._store.check([lost_key(rank)])]:
                raise MemberFailed(lost[0], f"ended its connection before it had copied piece {number}")
            if time.monotonic() > deadline:
                raise MemberFailed(missing[0], f"did not copy piece {number} within {self._timeout_s:g} s")
            with suppress(PublishError):
                self._store.wait(list(keys.values()), timedelta(seconds=min(LOOK_S, self._timeout_s)))
        # A group may live for many publishes.
        for key in (_ready(number), *keys.values()):
            self._store.delete_key(key)


def _ready(number: int) -> str:
    return f"ipc/ready/{number}"


def _acknowledged(number: int, rank: int) -> str:
    return f"ipc/acknowledged/{number}/{rank}"


def _finish_copies(device: torch.device) -> None:
    """Waits for the thread's stream: no other process can wait for it."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mapped_file(file: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]; the mapping outlives the descriptor."""
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8)


@cache
def _exported(device: torch.device, num_bytes: int) -> tuple[torch.Tensor, DeviceMemory]:
    """The buffers of this process on a device, for all its groups, one after the other: torch never frees what it has
    exported to a process which was killed."""
    buffers = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, *fields = getattr(buffers.untyped_storage(), f"_share_{device.type}_")()
    given: dict[str, Any] = {"kind": device.type, "device": _name_of(device)}
    return buffers, DeviceMemory.model_construct(**given, **dict(zip(SHARED_FIELDS, fields, strict=True)))


def _map_buffers(record_json: bytes, device: torch.device) -> torch.Tensor:
    """The sender's buffers, uint8 [2 x piece_bytes], for a receiver whose own memory is on `device`.

    Raises:
        PublishError: it is no record, or that of a sender elsewhere; or its memory cannot be mapped.
    """
    try:
        record = Record.model_validate_json(record_json)
    except ValidationError as error:
        raise PublishError(f"the record of the sender's buffers is not valid: {error}") from error
    memory, num_bytes = record.memory, 2 * record.piece_bytes
    if record.boot_id != _boot_id() or memory.kind != device.type:
        raise PublishError(
            f"the sender's buffers are {memory.kind} memory of the host with boot id {record.boot_id}, and this "
            f"instance is on {device.type} of the host {_boot_id()}: publish.transport = 'ipc' needs one host and one "
            "kind of device; set it to 'snapshot'"
        )
    try:
        buffers = _opened(memory, num_bytes) if isinstance(memory, HostMemory) else _imported(memory, num_bytes)
        is_right = bytes(buffers[: len(record.token)].tolist()) == record.token
    except (OSError, RuntimeError) as error:
        raise PublishError(
            f"cannot map the sender's buffers: {error}; publish.transport = 'ipc' needs trainer and instances of one "
            "user in one container, where there are containers; set it to 'snapshot' otherwise"
        ) from error
    if not is_right:
        raise PublishError(
            f"what was mapped from {memory} are not the sender's buffers: start all processes of the run with the same "
            "list of visible devices (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES), or set publish.transport to "
            "'snapshot'"
        )
    return buffers


def _opened(memory: HostMemory, num_bytes: int) -> torch.Tensor:
    path = Path(f"/proc/{memory.pid}/fd/{memory.fd}")
    if not str(path.readlink()).startswith(f"/memfd:{FILE_NAME} "):
        raise OSError(f"{path} is {path.readlink()}, not the sender's file")
    file = os.open(path, os.O_RDWR)
    try:
        # `from_file` would lengthen it.
        if (size := os.fstat(file).st_size) != num_bytes:
            raise OSError(f"the sender's file has {size} bytes, its record says {num_bytes}")
        return _mapped_file(file, num_bytes)
    finally:
        os.close(file)


def _imported(memory: DeviceMemory, num_bytes: int) -> torch.Tensor:
    """Both functions take the same eight arguments: torch/csrc/StorageSharing.cpp, and of Ascend/pytorch
    torch_npu/csrc/ipc/StorageSharing.cpp, which torch_npu/utils/storage.py adds to `UntypedStorage`."""
    if memory.num_bytes != num_bytes:
        raise RuntimeError(f"the exported storage has {memory.num_bytes} bytes, its record says {num_bytes}")
    devices = [torch.device(memory.kind, i) for i in range(torch.get_device_module(memory.kind).device_count())]
    names = [_name_of(device) for device in devices]
    if memory.device not in names:
        raise RuntimeError(f"the sender's device {memory.device} is not among those that this process sees: {names}")
    device = devices[names.index(memory.device)]
    fields = [getattr(memory, name) for name in SHARED_FIELDS]
    storage = getattr(torch.UntypedStorage, f"_new_shared_{memory.kind}")(device.index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (num_bytes,), (1,))


def _name_of(device: torch.device) -> str:
    """A device's name in every process of the host: on CUDA its UUID. torch_npu offers none, so it is the number by
    which the environment made it visible; the token shows whether that was right."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return str(device.index) if visible is None else visible.split(",")[device.index].strip()
