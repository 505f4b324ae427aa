"""A running inference instance and a trainer's end of its weight group, for tests of every engine."""

import secrets
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from async_rl.shared.weights.changes import LastSent
from async_rl.shared.weights.choice import Choice
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.store import StoreServer
from async_rl.shared.weights.stream import WeightGroup
from benchmarks.common.running_instance import START_TIMEOUT_S, wait_for_url
from inference_service.weight_transfer.receiver import parameter_views
from tests.support.clock import Clock

GROUP_TIMEOUT_S = 60.0


@dataclass
class Instance:
    """A running server: `client` is bound to its URL."""

    url: str
    process: subprocess.Popen[str]
    client: httpx.Client

    def generate(self, token_ids: Sequence[int], **params: Any) -> dict[str, Any]:
        """POST /inference/v1/generate, which must succeed; `logprobs` defaults to 0."""
        body = {"token_ids": list(token_ids), "sampling_params": {"logprobs": 0, **params}}
        answer = self.client.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        generated: dict[str, Any] = answer.json()
        return generated

    def post(self, path: str, body: object = None, status: int = 200) -> Any:
        answer = self.client.post(path, json={} if body is None else body)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def tokens_made_beside(self, num_tokens: int) -> float:
        """Tokens that the engine samples while it generates `num_tokens` for one response: more if others run."""
        # The running step may still finish.
        self.generate([5, 6], max_tokens=2, ignore_eos=True)
        before = self.metric("vllm:generation_tokens_total")
        self.generate([5, 6], max_tokens=num_tokens, ignore_eos=True)
        return self.metric("vllm:generation_tokens_total") - before

    def answer_others(self) -> None:
        """Lets the server's event loop run often enough to deliver all pending messages."""
        for _ in range(50):
            self.client.get("/is_paused").raise_for_status()

    def metric(self, name: str) -> float:
        line = next(x for x in self.client.get("/metrics").text.splitlines() if x.startswith(name))
        return float(line.split()[-1])


def wait_until_ready(
    process: "subprocess.Popen[str]", headers: Mapping[str, str] | None = None, timeout_s: float = START_TIMEOUT_S
) -> Instance:
    """The instance that `launch` started, once it is ready."""
    url = wait_for_url(process, timeout_s)
    return Instance(url, process, httpx.Client(base_url=url, timeout=60, headers=headers))


class TrainerSide:
    """Rank 0 of a weight group: performs a trainer's publish, one step at a time."""

    def __init__(self, instances: Sequence[Instance], timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self.instances = instances
        self.last: LastSent | None = None
        """Where it is one, what has changed since is sent where that is possible: for the sender no time passes."""
        self.threads = ThreadPoolExecutor(len(instances))
        world_size = len(instances) + 1
        secret = secrets.token_hex()
        self.server = StoreServer("127.0.0.1", [secret] * len(instances))
        info = {
            "master_address": "127.0.0.1",
            "master_port": self.server.port,
            "secret": secret,
            "world_size": world_size,
            "backend": "sockets",
            "bucket_bytes": 20_000,
            "timeout_s": timeout_s,
        }
        calls = [
            self.threads.submit(i.post, "/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": rank}})
            for rank, i in enumerate(instances, start=1)
        ]
        self.group = WeightGroup(self.server.store(timeout_s), 0, world_size, "sockets", timeout_s)
        self.group.choice = Choice(Clock())
        for call in calls:
            call.result()

    @staticmethod
    def stream(model: torch.nn.Module) -> list[tuple[TensorSpec, torch.Tensor]]:
        return [
            (TensorSpec(name, str(p.dtype).removeprefix("torch."), tuple(p.shape)), p)
            for name, p in parameter_views(model).items()
        ]

    @staticmethod
    def update_info(stream: Sequence[tuple[TensorSpec, torch.Tensor]]) -> dict[str, Any]:
        specs = [spec for spec, _ in stream]
        return {
            "update_info": {
                "names": [s.name for s in specs],
                "dtype_names": [s.dtype_name for s in specs],
                "shapes": [list(s.shape) for s in specs],
            }
        }

    def call_update(self, stream: Sequence[tuple[TensorSpec, torch.Tensor]], status: int = 200) -> list[Future[Any]]:
        """Announces the stream to all instances and waits until they are ready to receive it."""
        calls = [
            self.threads.submit(i.post, "/update_weights", self.update_info(stream), status) for i in self.instances
        ]
        assert not self.group.wait_accepted(GROUP_TIMEOUT_S), "an instance never announced itself"
        return calls

    def send(self, stream: Sequence[tuple[TensorSpec, torch.Tensor]]) -> str:
        calls = self.call_update(stream)
        fingerprint = self.group.send(iter(stream), 20_000, self.last)
        for call in calls:
            call.result()
        return fingerprint

    def die(self) -> None:
        """Closes all connections, like the end of the trainer's process."""
        self.server.close()
        self.group.close()

    def publish(self, model: torch.nn.Module, version: str, mode: str = "keep") -> str:
        """Pause, start, send everything, finish, resume; returns the sender's fingerprint."""
        for i in self.instances:
            i.client.post("/pause", params={"mode": mode}).raise_for_status()
            i.post("/start_weight_update")
        fingerprint = self.send(self.stream(model))
        for i in self.instances:
            i.post("/finish_weight_update", {"weight_version": version})
            i.post("/resume")
        return fingerprint
