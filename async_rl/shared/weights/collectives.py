"""Collectives of a weight group with enforced timeouts on every backend; only `weight_stream.WeightGroup` uses them.

Work of gloo raises once its timeout has passed. That of nccl and hccl does not: `wait` only orders streams, and returns
at once whether the peer is alive or not; the next copy to the host then hangs, and a watchdog ends the whole process
some time later. So their work is polled, and the group is aborted if the timeout passes first.
"""

import hmac
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from async_rl.errors import PublishError
from async_rl.shared.net.local_address import choose_interface
from async_rl.shared.weights.chain import LEAST_S, Chain
from async_rl.shared.weights.store import RendezvousStore
from async_rl.shared.weights.store_wire import PROOF_BYTES, NotInvited

NUM_IN_FLIGHT = 8
"""Concurrent collectives at most; gloo has as many threads, so an unresponsive peer costs one timeout for all."""

POLL_S = 0.0002
"""A bucket takes milliseconds."""

ABORT_TIMEOUT_S = 10.0
"""An abort that itself hangs is abandoned."""

ABANDON_POLL_S = 0.05

ENDED = "the rendezvous of the weight group was ended by its host"

NATIVE_TIMEOUTS = 3
"""The timeouts of nccl and hccl, whose watchdogs end the process, are this many times ours."""

DEVICES = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu", "cpu_ipc": "cpu", "cuda_ipc": "cuda", "npu_ipc": "npu"}


class TimedOut(RuntimeError):
    """A collective did not finish in time, so the group was aborted."""


class MemberFailed(RuntimeError):
    """The sender knows which rank did not take its part."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


class Collectives:
    """A process group with enforced timeouts.

    Args:
        group: of torch.distributed, or one with the same interface.
        device: where its tensors are.
        raises_in_time: whether the `wait` of its work blocks, and raises when its timeout has passed.
        has_ended: whether the host of the rendezvous, which sends, has ended it: the peers of an aborted member of nccl
            or hccl do not notice it, while a closed socket of gloo is noticed at once.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        timeout_s: float,
        *,
        raises_in_time: bool,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.device = device
        self._group = group
        self._timeout_s = timeout_s
        self._raises_in_time = raises_in_time
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
        if not self._raises_in_time:
            self._poll(work)
        work.wait()

    def connect(self) -> None:
        """Makes the connections: nccl and hccl do so in the first collective, and block until then.

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

    def prove(self, world_size: int, shows: bytes, expects: bytes) -> None:
        """Exchanges proofs with each other member over the same connections that will transfer the weights.

        gloo accepts the first peer that connects to its ports. With nccl and hccl the members identify each other by an
        id that they get from the store.

        Args:
            shows, expects: as `RendezvousStore.proofs` has them, for `world_size` ranks at least.

        Raises:
            NotInvited: the peer of a connection is not the member that has this rank.
        """
        sent = torch.frombuffer(bytearray(shows[: world_size * PROOF_BYTES]), dtype=torch.uint8)
        received = torch.empty_like(sent)
        self.wait(self._open_group().alltoall_base(received, sent, [], [], dist.AllToAllOptions()))
        proofs = bytes(received.tolist())
        for other in range(world_size):
            place = slice(other * PROOF_BYTES, (other + 1) * PROOF_BYTES)
            if not hmac.compare_digest(proofs[place], expects[place]):
                raise NotInvited(f"whoever is connected as rank {other} is not who was invited as this rank")

    def let_end(self, works: Iterable[Any], within_s: float | None = None) -> None:
        """Ends work left running by an error: until then it holds connections, and writes to its buffers.

        Args:
            within_s: for all of it; by default what has no error yet has its own time limit.
        """
        left = list(works)
        if left and not self._raises_in_time:
            self.abort()
            return
        if left and within_s is not None:
            self._end_within(left, within_s)
            return
        for work in left:
            with suppress(RuntimeError):
                work.wait()

    def _end_within(self, works: list[Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            for work in works:
                work.wait(max(deadline - time.monotonic(), LEAST_S))
        except (RuntimeError, TimeoutError):
            if self._group is not None:
                self._group.abort()

    def abort(self) -> None:
        """Ends running work, here and thereby at the other members; the group is unusable afterwards."""
        group, self._group = self._group, None
        if group is not None:
            _ends_within(ABORT_TIMEOUT_S, lambda: _abort(group))

    def close(self) -> None:
        """Drops the connections; a second call does nothing.

        With nccl and hccl this is an abort: ncclCommDestroy may wait until the members on the same host call it too,
        and those leave only when they are invited to the next group.
        """
        if not self._raises_in_time:
            self.abort()
            return
        group, self._group = self._group, None
        if group is not None:
            # gloo closes its sockets only with the object itself, which is freed by this call.
            group.shutdown()

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
) -> Collectives:
    """Returns when all members have connected and proven that they were invited; its tensors are on `device`.

    gloo waits for one peer after the other, up to the timeout for each, also when the rendezvous was called off: it is
    left to itself then.

    Raises:
        NotInvited: an uninvited process took the place of a member.
        RuntimeError, PublishError: they did not all connect within the timeout, or the host ended the rendezvous.
    """
    if backend == "gloo":
        formed: list[Collectives] = []

        def form() -> None:
            group = _gloo_group(store, rank, world_size, timedelta(seconds=timeout_s))
            collectives = Collectives(group, device, timeout_s, raises_in_time=True)
            collectives.prove(world_size, *store.proofs())
            formed.append(collectives)

        if not _ends_within(timeout_s, form, store.has_ended):
            if store.has_ended():
                raise PublishError(ENDED)
            raise TimedOut(f"not all members connected within {timeout_s:g} s")
        return formed[0]
    choose_interface(backend, store.address)
    group = make_group(store, rank, world_size, backend, timedelta(seconds=NATIVE_TIMEOUTS * timeout_s))
    collectives = Collectives(group, device, timeout_s, raises_in_time=False, has_ended=store.has_ended)
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


def _gloo_group(store: RendezvousStore, rank: int, world_size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # By default gloo uses the address of this host's own name, which other hosts may not reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.address)]
    options._threads = NUM_IN_FLIGHT
    return Chain(store, rank, world_size, options)


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
