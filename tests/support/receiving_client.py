"""An instance's end of a broadcast in a thread of this process: what `InstanceClient` offers a publish, by name."""

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import torch

from async_rl.errors import InstanceError, InstanceRefused, PublishError
from async_rl.rollouts.instance.http import InstanceHttp
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import InstanceEntry, Membership
from async_rl.shared.protocol import routes
from async_rl.shared.protocol.inference import InitInfo, UpdateInfo, UpdateRequest
from async_rl.shared.protocol.sequence import Answer, Call
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.store import join_rendezvous
from async_rl.shared.weights.stream import WeightGroup
from tests.support.lost_store import lose, slow, unreachable
from tests.support.updated_instance import carried_out


class ReceivingClient:
    """One worker that joins and receives for real.

    `fault` is the step that it refuses, "hang" at the update, "leave" when it is about to receive, or "reject" when it
    has received all. Of a rendezvous: "late" comes after the timeout, "break" comes and loses its connection, "break
    unseen" also says so late, "slow" takes its time there, and to "unreachable" ones the next cannot connect.
    """

    def __init__(self, url: str, fault: str | None = None) -> None:
        self.url = url
        self.fault = fault
        self.nccl: list[str] = []
        self.num_joins = 0
        self.received: dict[str, torch.Tensor] = {}
        self._rank = self._bucket_bytes = 0
        self._group: WeightGroup | None = None

    async def world_size(self, timeout_s: float) -> int:
        self._refuse("world_size")
        return 1

    async def nccl_versions(self, timeout_s: float) -> list[str]:
        return self.nccl

    async def init_weight_transfer(self, info: InitInfo, timeout_s: float) -> None:
        self._refuse("init")
        await self._answered(asyncio.to_thread(self._join, info))

    async def in_order(self, calls: Sequence[Call], timeout_s: float | None) -> tuple[list[Answer], None]:
        return await carried_out(calls, self._answer), None

    def require(self, call: Call, answer: Answer) -> None:
        InstanceHttp(cast(Any, None), self.url).require(call, answer)

    async def _answer(self, call: Call) -> Answer:
        path = call.path.partition("?")[0]
        if self.fault is not None and path.startswith(f"/{self.fault}"):
            return Answer(status=500, body=f"it refuses {self.fault}")
        if path == routes.UPDATE_WEIGHTS:
            if self.fault == "hang":
                await asyncio.Event().wait()
            info = UpdateRequest.model_validate_json(call.body or "").update_info
            await self._answered(asyncio.to_thread(self._receive, info))
        return Answer(status=200, body=json.dumps(call.expected or {}))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _refuse(self, step: str) -> None:
        if self.fault == step:
            raise InstanceRefused(f"instance {self.url} refuses {step}", 500)

    async def _answered(self, work: Coroutine[Any, Any, None]) -> None:
        problem = None
        try:
            await work
        except PublishError as error:
            problem = str(error)
        if problem is not None:
            if self.fault == "break unseen":
                await asyncio.sleep(1.0)
            # Outside of the handler: the error's frames would keep the connections open, and others wait on these.
            self.close()
            raise InstanceError(f"instance {self.url}: {problem}")

    def _join(self, info: InitInfo) -> None:
        self.close()
        if self.fault == "late":
            time.sleep(info.timeout_s + 0.2)
        store = join_rendezvous(info.master_address, info.master_port, info.secret, info.timeout_s)
        if self.fault in ("break", "break unseen"):
            store = lose(store)
        if self.fault == "slow":
            store = slow(store)
        if self.fault == "unreachable":
            store = unreachable(store)
        self._group = WeightGroup(store, info.rank_offset, info.world_size, info.backend, info.timeout_s)
        self._rank, self._bucket_bytes = info.rank_offset, info.bucket_bytes
        self.num_joins += 1

    def _receive(self, info: UpdateInfo) -> None:
        assert self._group is not None
        fields = zip(info.names, info.dtype_names, info.shapes, strict=True)
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in fields]
        self._group.announce(self._rank)
        if self.fault == "leave":
            self.close()
            raise InstanceError(f"instance {self.url} is gone")
        self.received = {spec.name: tensor.clone() for spec, tensor in self._group.receive(specs, self._bucket_bytes)}
        if self.fault == "reject":
            raise InstanceError(f"instance {self.url} does not take what it received")


def receiving_member(name: str, fault: str | None = None) -> Member:
    """In service already, so that its group is kept from one move to the next."""
    entry = InstanceEntry(f"http://127.0.0.1:{name}")
    Membership().end_publish("v0", [entry], {entry.url: None})
    return Member(name, ReceivingClient(entry.url, fault), entry)  # type: ignore[arg-type]
