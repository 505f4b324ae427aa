"""The faults of `audit_faults.py` in real vLLM, each in its weights or in front of it: a few servers, by what they are
started with, get the weights of one fault after the other."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI, Request, Response
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.snapshot import SnapshotWriter
from tests.support.audit_faults import FAULTS, RAW, Fault, Setting, stale
from tests.support.audited_engine import ASGI, asked, served_app
from tests.support.running_instance import Instance, TrainerSide

SIZE = {"head_dim": 32, "num_hidden_layers": 4}
"""vLLM's attention on CPU has no heads smaller than 32; one more layer than a fault needs costs less than a server."""

SHAPING = ("model_type", "vocab_size", "rope_parameters", "sliding_window", *SIZE)
"""Keys of config.json by which servers differ."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Tensors = dict[str, torch.Tensor]
Start = Callable[..., AbstractContextManager[Instance]]
"""(checkpoint, options of vLLM's) -> a server."""


class VllmServers:
    """Those that were started so far; they end with `stack`."""

    def __init__(self, start: Start, stack: ExitStack) -> None:
        self._start = start
        self._stack = stack
        self._running: dict[str, Instance] = {}

    def with_weights(
        self, checkpoint: Path, tensors: Tensors, dtype: str, arguments: tuple[str, ...], *, clears_cache: bool = True
    ) -> Instance:
        """A server for the config.json and tokenizer of `checkpoint`; its head is never tied."""
        config = json.loads((checkpoint / "config.json").read_text())
        config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
        key = json.dumps([{name: config.get(name) for name in SHAPING}, dtype, *arguments], sort_keys=True)
        if key in self._running:
            _update(self._running[key], tensors, checkpoint.parent, clears_cache=clears_cache)
        else:
            directory = checkpoint.parent / "started"
            shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
            (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})
            options = ("--dtype", dtype, "--max-num-seqs", "48", *arguments)
            self._running[key] = self._stack.enter_context(self._start(directory, *options))
        return self._running[key]


def _update(server: Instance, tensors: Tensors, directory: Path, *, clears_cache: bool) -> None:
    """By a snapshot, as a trainer does it, which clears the cache."""
    stream = [(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)), t) for n, t in tensors.items()]
    writer = SnapshotWriter(directory / "update.safetensors", [spec for spec, _ in stream])
    writer.write(iter(stream))
    update = TrainerSide.update_info(stream)
    update["update_info"]["snapshot"] = str(writer.commit())
    server.client.post("/pause", params={"mode": "wait", "clear_cache": clears_cache}).raise_for_status()
    server.post("/start_weight_update")
    server.post("/update_weights", update)
    server.post("/finish_weight_update", {"weight_version": directory.name})
    server.post("/resume")


def tensors_of(checkpoint: Path, dtype: str, change: Callable[[Any], None] = lambda model: None) -> Tensors:
    """All weights, with a head of its own, of a changed model."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=DTYPES[dtype])
    with torch.no_grad():
        change(model)
        return {name: p.detach().clone().contiguous() for name, p in model.named_parameters(remove_duplicate=False)}


@dataclass(frozen=True)
class VllmSetting(Setting):
    """The files of one audit of vLLM."""

    servers: VllmServers

    @property
    def size(self) -> Mapping[str, Any]:
        return {**SIZE, **self.fault.size}

    @contextmanager
    def engine(self) -> Iterator[str]:
        """vLLM with the fault, or what is in front of it; its URL."""
        fault = self.fault
        tensors = tensors_of(self.served, fault.dtype, lambda model: fault.change(model, self))
        server = self.servers.with_weights(self.served, tensors, fault.dtype, fault.arguments)
        with forwarded(server.url, fault.wrap(self)) if fault.wrap else nullcontext(server.url) as url:
            yield url

    @contextmanager
    def older_engine(self) -> Iterator[str]:
        # Log-probs of raw logits are those of the temperature 1.
        tensors = tensors_of(self.older, self.fault.dtype)
        yield self.servers.with_weights(self.older, tensors, self.fault.dtype, RAW).url

    def update(self, *, clears_cache: bool) -> None:
        """The checkpoint's weights in place of those that the server has."""
        fault, tensors = self.fault, tensors_of(self.sound, self.fault.dtype)
        self.servers.with_weights(self.sound, tensors, fault.dtype, fault.arguments, clears_cache=clears_cache)


@contextmanager
def forwarded(url: str, wrap: Callable[[Any], ASGI]) -> Iterator[str]:
    """A wrapped proxy in front of a server; its URL."""
    app = FastAPI()
    client = httpx.AsyncClient(
        base_url=url, timeout=120, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
    )

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        kept = ("content-type", "authorization")
        headers = {name: value for name, value in request.headers.items() if name in kept}
        answer = await client.request(request.method, path, content=await request.body(), headers=headers)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    with served_app(wrap(app)) as proxy:
        yield proxy


def kept_prefixes(setting: "VllmSetting") -> Callable[[Any], ASGI]:
    """The weights arrive once the command of the update has ended, and what vLLM keeps of prompts stays."""
    updated, lock, is_done = setting.directory / "updated", asyncio.Lock(), asyncio.Event()

    def wrap(app: Any) -> ASGI:
        async def call(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
            if updated.exists() and not is_done.is_set():
                async with lock:
                    if not is_done.is_set():
                        await asyncio.to_thread(setting.update, clears_cache=False)
                        is_done.set()
            await app(scope, receive, send)

        return call

    return wrap


def _brief(path: str, body: dict[str, Any]) -> None:
    if path == "/tokenize":
        body["messages"] = [{"role": "system", "content": "Be brief."}, *body["messages"]]


KEPT, TEMPLATE = "prefixes kept over an update", "another chat template"
NOT_IN_VLLM = ("a head in bfloat16", "another rope factor", "a window one short")
"""A head of another dtype than the model's, which it does not have; the two others need a server for each of them."""

VLLM_FAULTS: dict[str, Fault] = {
    **{name: fault for name, fault in FAULTS.items() if name not in NOT_IN_VLLM},
    KEPT: replace(FAULTS[KEPT], change=stale(""), wrap=kept_prefixes),  # type: ignore[arg-type]
    TEMPLATE: replace(FAULTS[TEMPLATE], wrap=lambda setting: asked(_brief)),
}
"""In vLLM these two are its own: the one has a cache, the other a route for it."""
