"""A scripted instance that also receives weights: it joins real weight groups, or reads a snapshot.

Script keys, besides those of scripted_instance.py: refuse = route that returns 500; hang = route that never responds;
die = route that ends the process, before the group (init), before the stream (update) or in it (receive);
broken_groups: the number of groups in whose rendezvous it is lost; fingerprint: the one it claims to have received;
shift: added to the log-probs of its responses, as if it computed with other weights; lie: one of `LIES`, which it
tells as it receives; poses: it comes to its group as another member; stall: [place, seconds or null], its process
stands still once there: before it comes to a group (come) or when it has (meet), before the stream (update), at its
first tensor (first), amid it (amid), when it has all (answer), when it is to serve it (finish); at "busy" it goes on,
and receives nothing; takes_single_calls_only: it has no route for several.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import aiohttp
from aiohttp import web

from async_rl.errors import PublishError
from async_rl.shared.protocol.inference import InitInfo, UpdateInfo
from async_rl.shared.protocol.routes import SEQUENCE
from async_rl.shared.protocol.sequence import Answer, SequenceRequest, goes_on
from async_rl.shared.weights.store import RendezvousStore, join_rendezvous
from async_rl.shared.weights.stream import WeightGroup
from inference_service.weight_transfer import receiver
from inference_service.weight_transfer.receiver import WeightReceiver, announced_specs
from tests.support.lost_store import before_addresses, lose
from tests.support.scripted_instance import Instance, refusal, serve


class ReceivingInstance(Instance):
    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__(script)
        self.receiver = WeightReceiver()
        vars(receiver)["join_rendezvous"] = self.join_rendezvous
        self.init: dict[str, Any] = {}
        self.sums: list[float] = []
        self.paused = False
        self.updating = False
        self.asleep: set[str] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/get_world_size", self.get_world_size),
            web.get("/sums", self.get_sums),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/init_weight_transfer_engine", self.init_weight_transfer),
            web.post("/start_weight_update", self.start),
            web.post("/update_weights", self.update),
            web.post("/finish_weight_update", self.finish),
            web.post("/collective_rpc", self.rpc),
            web.post(SEQUENCE, self.sequence),
        ]

    async def sequence(self, request: web.Request) -> web.Response:
        """Carried out by calls of itself."""
        if self.script.get("takes_single_calls_only"):
            return web.Response(status=404)
        answers: list[Answer] = []
        assert request.transport is not None
        url = f"http://127.0.0.1:{request.transport.get_extra_info('sockname')[1]}"
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(None)) as session:
            for call in SequenceRequest.model_validate_json(await request.text()).calls:
                async with session.request(call.method, call.path, data=call.body) as answer:
                    answers.append(Answer(status=answer.status, body=await answer.text()))
                if not goes_on(call, answers[-1]):
                    break
        return web.json_response({"answers": [answer.model_dump() for answer in answers]})

    async def fate(self, route: str) -> web.Response | None:
        if self.script.get("die") == route:
            os._exit(1)
        if self.script.get("hang") == route:
            await asyncio.sleep(3600)
        return refusal(500, f"{route} is refused") if self.script.get("refuse") == route else None

    def stall(self, place: str) -> None:
        if (self.script.get("stall") or [None])[0] != place:
            return
        (_, seconds), self.script["stall"] = self.script["stall"], None
        if place == "busy":
            time.sleep(seconds)
            return
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    async def get_world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def get_sums(self, request: web.Request) -> web.Response:
        return web.json_response(self.sums)

    async def pause(self, request: web.Request) -> web.Response:
        if refused := await self.fate("pause"):
            return refused
        self.paused = True
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        if self.asleep:
            return refusal(500, f"it sleeps: {self.asleep}")
        self.paused = False
        return web.json_response({})

    async def sleep(self, request: web.Request) -> web.Response:
        if refused := await self.fate("sleep"):
            return refused
        self.asleep, self.paused = {"weights", "kv_cache"}, True
        return web.json_response({})

    async def wake_up(self, request: web.Request) -> web.Response:
        tag = request.query["tags"]
        if refused := await self.fate(f"wake {tag}"):
            return refused
        self.asleep.discard(tag)
        return web.json_response({})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.asleep) or self.paused})

    async def init_weight_transfer(self, request: web.Request) -> web.Response:
        if refused := await self.fate("init"):
            return refused
        self.receiver.leave()
        self.init = (await request.json())["init_info"]
        try:
            await asyncio.to_thread(self.join)
        except PublishError as error:
            return refusal(500, str(error))
        return web.json_response({})

    def join(self) -> None:
        info = InitInfo(**self.init)
        self.stall("come")
        if self.script.get("poses"):
            info = info.model_copy(update={"rank_offset": self.others[0]})
        self.receiver.join(info)

    def join_rendezvous(self, *where: Any) -> RendezvousStore:
        store = join_rendezvous(*where)
        if self.script.get("broken_groups", 0) > 0:
            self.script["broken_groups"] -= 1
            store = lose(store)
        return before_addresses(store, lambda: self.stall("meet"))

    @property
    def group(self) -> WeightGroup:
        """That of the first stage."""
        return self.receiver._groups[0]

    async def start(self, request: web.Request) -> web.Response:
        if refused := await self.fate("start"):
            return refused
        if self.updating or not self.paused or "weights" in self.asleep:
            return refusal(500, "an update is active, or it is not paused, or it sleeps")
        self.updating = True
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        if not self.updating:
            return refusal(500, "no update was started")
        if refused := await self.fate("update"):
            self.updating = False
            return refused
        self.stall("update")
        try:
            await asyncio.to_thread(self.receive, info)
        except PublishError as error:
            # Like a real instance: the group is no longer usable, and the update ends.
            self.receiver.leave()
            self.updating = False
            self.script["health"] = 503
            return refusal(500, str(error))
        return web.json_response({})

    def receive(self, info: dict[str, Any]) -> None:
        update = UpdateInfo(**info)
        self.sums = []
        if lie := LIES.get(self.script.get("lie") or ""):
            lie(self)
            if self.script["lie"].startswith("only "):
                return
        sums: dict[str, float] = {}
        for number, (spec, tensor) in enumerate(self.receiver.stream(update, announced_specs(update))):
            if self.script.get("die") == "receive":
                os._exit(1)
            if number in (0, len(update.names) // 2):
                self.stall("amid" if number else "first")
                self.stall("busy")
            sums[spec.name] = float(tensor.double().sum())
        self.sums = [sums[name] for name in update.names]
        self.stall("answer")

    def tell(self, *requests: dict[str, Any]) -> None:
        """Says something in the store of each of its weight groups; goes on whatever that answers."""
        for group, request in product(self.receiver._groups, requests):
            with suppress(PublishError):
                group._store._ask(request)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(1, self.init["world_size"]) if rank != self.init["rank_offset"]]

    async def finish(self, request: web.Request) -> web.Response:
        if refused := await self.fate("finish"):
            return refused
        self.stall("finish")
        if not self.updating:
            return refusal(500, "no update was started")
        self.updating = False
        self.script["version"] = (await request.json())["weight_version"]
        self.script["health"] = 200
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        answer = await super().generate(request)
        assert isinstance(answer, web.Response) and answer.text is not None, "scripts of this instance do not stream"
        body = json.loads(answer.text)
        for choice in body.get("choices", ()):
            for token in choice["logprobs"]["content"]:
                token["logprob"] += self.script.get("shift", 0.0)
        return web.json_response(body, status=answer.status)

    async def rpc(self, request: web.Request) -> web.Response:
        assert (await request.json())["method"] == "weight_fingerprint"
        return web.json_response({"results": [self.script.get("fingerprint") or self.receiver.fingerprint]})


def _write(one: ReceivingInstance, key: str, ranks: Sequence[int]) -> None:
    """`key` of the pieces, updates and words to come, for each of the ranks."""
    keys = [key.format(number=number, rank=rank) for number in range(100) for rank in ranks]
    one.tell(*({"op": "set", "key": key, "value": ""} for key in keys))


def _delete(one: ReceivingInstance, key: str) -> None:
    keys = [key.format(number=number, rank=rank) for number in range(100) for rank in one.others]
    one.tell(*({"op": "delete", "key": key} for key in keys))


def _accept(one: ReceivingInstance) -> None:
    one.group.announce(one.init["rank_offset"])


def _accept_and_acknowledge(one: ReceivingInstance) -> None:
    _accept(one)
    _acknowledge(one)


def _acknowledge(one: ReceivingInstance) -> None:
    _write(one, "ipc/acknowledged/{number}/{rank}", [one.init["rank_offset"]])


LIES: dict[str, Callable[[ReceivingInstance], object]] = {
    "it has copied what others have not": lambda one: _write(one, "ipc/acknowledged/{number}/{rank}", one.others),
    "others accept": lambda one: _write(one, "update/{number}/{rank}", one.others),
    "pieces are ready": lambda one: _write(one, "ipc/ready/{number}", [0]),
    "words of the sender": lambda one: _write(one, "update/{number}/word/0", [0]),
    "others have not copied": lambda one: _delete(one, "ipc/acknowledged/{number}/{rank}"),
    "no piece is ready": lambda one: _delete(one, "ipc/ready/{number}"),
    "others are lost": lambda one: _write(one, "lost/{rank}", one.others),
    "it is the others": lambda one: one.tell(*({"op": "set_at_end", "key": f"lost/{o}"} for o in one.others)),
    "another record": lambda one: _write(one, "ipc/record", [0]),
    "it has copied what comes later": _acknowledge,
    "only it has received all": lambda one: None,
    "only it accepts": _accept,
    "only it acknowledges": _accept_and_acknowledge,
}
"""Those that begin with "only" are told in place of receiving anything."""


if __name__ == "__main__":
    asyncio.run(serve(ReceivingInstance(json.loads(sys.argv[1]))))
