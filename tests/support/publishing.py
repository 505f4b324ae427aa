"""Small weights to publish, and publishers for receiving instances, each with its own pool."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.event_loop import EventLoopThread
from async_rl.pool.inference_pool import InferencePool
from async_rl.publish.admission import Admission
from async_rl.publish.canary import Canary
from async_rl.publish.probe import Probe
from async_rl.publish.publisher import Publisher
from async_rl.publish.snapshot_store import SnapshotStore
from async_rl.weights.stream import TensorSpec

TENSORS = {
    "embed.weight": torch.arange(3000, dtype=torch.float32).view(60, 50),
    "norm.weight": torch.full((7,), 0.5, dtype=torch.bfloat16),
    "head.weight": torch.randn(64, 50, generator=torch.Generator().manual_seed(0)),
}
SPECS = [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items()]
PROMPT = [5, 6, 7]
POOL_OPTIONS = ("join", "heartbeat_timeout_s")


def stream(scale: float = 1.0) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    for spec in SPECS:
        yield spec, TENSORS[spec.name] * scale


def sums(scale: float = 1.0) -> list[float]:
    return [float((tensor * scale).double().sum()) for tensor in TENSORS.values()]


def publish(publisher: Publisher, version: str, scale: float = 1.0, **options: Any) -> tuple[str, ...]:
    """Publishes; returns the URLs that serve the version."""
    return publisher.publish(version, SPECS, lambda: stream(scale), **options).instances


class Publishing:
    """Creates publishers like a session, and closes them."""

    def __init__(self, loop: EventLoopThread) -> None:
        self._loop = loop
        self._made: list[tuple[Publisher, InferencePool, SnapshotStore | None]] = []

    def make(
        self,
        *instances: Any,
        wait_s: float = 0.0,
        snapshot_dir: Path | None = None,
        canary: Canary | None = None,
        **options: Any,
    ) -> tuple[Publisher, InferencePool]:
        """`options` are settings of the pool or publish section; late joiners are admitted if the options allow it."""
        urls = tuple(instance.url for instance in instances)
        of_pool = {name: value for name, value in options.items() if name in POOL_OPTIONS}
        of_publish = {name: value for name, value in options.items() if name not in POOL_OPTIONS}
        pool = InferencePool(PoolSection(instances=urls, fleet_port=1, timeout_s=20.0, **of_pool))
        settings = {"timeout_s": 10.0, "bucket_bytes": 4096, "probe_tokens": 4} | of_publish
        config = PublishSection(snapshot_dir=snapshot_dir, **settings)
        snapshots = SnapshotStore(snapshot_dir, "run") if snapshot_dir else None
        admission = Admission(config)
        admission.canary = canary
        pool.late_joiners.admit = admission.admit
        probe = Probe(config, RolloutSection(), PROMPT) if config.probe_tokens else None
        publisher = Publisher(
            pool,
            self._loop,
            config,
            wait_s=wait_s,
            snapshots=snapshots,
            admission=admission,
            probe=probe,
            canary=canary,
        )
        self._made.append((publisher, pool, snapshots))
        return publisher, pool

    def close(self) -> None:
        for publisher, pool, snapshots in self._made:
            publisher.close()
            self._loop.run(pool.close())
            if snapshots is not None:
                snapshots.close()
