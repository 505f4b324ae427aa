"""Collectives of a weight group with enforced timeouts; only `stream.WeightGroup` uses them.

Between hosts without devices they are a chain of sockets (`chain.py`), otherwise of nccl or hccl, whose `wait` only
orders streams, and returns at once whether the peer is alive or not; the next copy to the host then hangs, and a
watchdog ends the whole process some time later. So their work is polled, and the group is aborted if the timeout passes
first.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from async_rl.shared.net.local_address import choose_interface
from async_rl.shared.weights.chain import Chain
from async_rl.shared.weights.store import ENDED, RendezvousStore

SOCKETS = "sockets"
"""The backend between hosts without devices."""

POLL_S = 0.0002
"""A bucket takes milliseconds."""

ABORT_TIMEOUT_S = 10.0
"""An abort that itself hangs is abandoned."""

ABANDON_POLL_S = 0.05

NATIVE_TIMEOUTS = 3
"""The timeouts of nccl and hccl, whose watchdogs end the process, are this many times ours."""

BACKENDS = {"cpu": SOCKETS, "cuda": "nccl", "npu": "hccl"}
"""That weight groups have on each kind of device."""

DEVICES = {SOCKETS: "cpu", "nccl": "cuda", "hccl": "npu", "cpu_ipc": "cpu", "cuda_ipc": "cuda", "npu_ipc": "npu"}


class TimedOut(RuntimeError):
    """A collective did not finish in time, so the group was aborted."""


class MemberFailed(RuntimeError):
    """The sender knows which rank did not take its part."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


class Collectives:
    """A process group of nccl or hccl with enforced timeouts.

    Args:
        group: of torch.distributed, or one with the same interface.
        device: where its tensors are.
        has_ended: whether the host of the rendezvous, which sends, has ended it: the peers of an aborted member do not
            notice it.
    """

    def __init__(
        self, group: Any, device: torch.device, timeout_s: float, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self.device = device
        self._group = group
        self._timeout_s = timeout_s
        self._has_ended = has_ended

    def broadcast(self, data: torch.Tensor) -> Any:
        """Starts a broadcast from rank 0; pass its work to `wait`. `data` is on the group's device.

        Raises:
            RuntimeError: the group is broken or closed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._open_group().broadcast([data], options)

    def wait(self, work: Any) -> None:
        """Returns when the work has finished, and later operations on the device may use its tensors.

        Raises:
            RuntimeError: it failed.
            TimedOut: it did not end within the timeout; the group is aborted.
        """
        self._poll(work)
        work.wait()

    def connect(self) -> None:
        """Makes the connections, as the first collective does, which blocks until then.

        Raises:
            RuntimeError: it failed.
            TimedOut: not all members took part within the timeout; the group is aborted.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        started: list[Any] = []
        if not _ends_within(self._timeout_s, lambda: started.append(self.broadcast(byte)), self._has_ended):
            self.abort()
            self._require_host()
            raise TimedOut(f"not all members connected within {self._timeout_s:g} s")
        self.wait(started[0])

    def abort(self) -> None:
        """Ends running work, here and thereby at the other members; the group is unusable afterwards."""
        group, self._group = self._group, None
        if group is not None:
            _ends_within(ABORT_TIMEOUT_S, lambda: _abort(group))

    def close(self) -> None:
        """Drops the connections; a second call does nothing.

        It is an abort: ncclCommDestroy may wait until the members on the same host call it too, and those leave only
        when they are invited to the next group.
        """
        self.abort()

    def _poll(self, work: Any) -> None:
        started = next_look = time.monotonic()
        while not work.is_completed():
            if (now := time.monotonic()) > started + self._timeout_s:
                self.abort()
                raise TimedOut(f"it did not end within {self._timeout_s:g} s")
            if now >= next_look:
                self._require_host()
                next_look = now + ABANDON_POLL_S
            time.sleep(POLL_S)
        if (error := work.exception()) is not None:
            self.abort()
            raise RuntimeError(str(error))

    def _require_host(self) -> None:
        if self._has_ended():
            self.abort()
            raise RuntimeError(ENDED)

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group


def current_device(backend: str) -> torch.device:
    """Where tensors of a group of this backend are: the calling thread's current device, which is 0 in a new thread."""
    kind = DEVICES[backend]
    return torch.device(kind) if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())


def open_collectives(
    store: RendezvousStore, rank: int, world_size: int, backend: str, timeout_s: float, device: torch.device
) -> Collectives | Chain:
    """Returns when all members have connected; its tensors are on `device`.

    Raises:
        NotInvited: an uninvited process took the place of a member.
        RuntimeError, PublishError: they did not all connect within the timeout, or the host ended the rendezvous.
    """
    if backend == SOCKETS:
        return Chain(store, rank, world_size, timeout_s)
    choose_interface(backend, store.address)
    group = make_group(store, rank, world_size, backend, timedelta(seconds=NATIVE_TIMEOUTS * timeout_s))
    collectives = Collectives(group, device, timeout_s, store.has_ended)
    collectives.connect()
    return collectives


def make_group(store: RendezvousStore, rank: int, world_size: int, backend: str, timeout: timedelta) -> Any:
    """A process group of nccl or hccl."""
    # torch_npu is present only with an NPU; torch.distributed has no type for it.
    module = dist if backend == "nccl" else import_module("torch_npu._C._distributed_c10d")
    group_type = getattr(module, f"ProcessGroup{backend.upper()}")
    options = group_type.Options()
    options._timeout = timeout
    return group_type(store, rank, world_size, options)


def _abort(group: Any) -> None:
    """torch_npu has its own method; the one inherited from torch does not abort hccl's communicators."""
    if hasattr(group, "abort_hccl_comm"):
        group.abort_hccl_comm("the weight group was closed, or a collective of it did not end in time")
    else:
        group.abort()


def _ends_within(timeout_s: float, call: Callable[[], object], is_over: Callable[[], bool] = lambda: False) -> bool:
    """Whether a call that may block forever has ended in time, and before `is_over`; otherwise it is abandoned in its
    thread.

    Raises:
        Exception: the call's own exception.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="async-rl-collective", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0 and not is_over():
        thread.join(min(left_s, ABANDON_POLL_S))
    if errors:
        raise errors[0]
    return not thread.is_alive()
