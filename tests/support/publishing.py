"""Small weights to publish, and publishers for receiving instances, each with its own pool.

The publishers call their senders as through a connection: whatever is not plain data fails.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import LeaderFailed
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.method.types import Publication
from async_rl.producer.frames import error_as_data, error_from_data
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.admission import Admission
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.probe import Probe
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.rollouts.publish.remote_sender import RemoteSender, serve
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.sender import Score, Sender
from async_rl.shared.weights.fingerprint import MakeStream, TensorSpec
from async_rl.shared.weights.sender import WeightSender, WeightSource
from tests.support.stage_senders import StageSenders

TENSORS = {
    "embed.weight": torch.arange(3000, dtype=torch.float32).view(60, 50),
    "norm.weight": torch.full((7,), 0.5, dtype=torch.bfloat16),
    "head.weight": torch.randn(64, 50, generator=torch.Generator().manual_seed(0)),
}
SPECS = [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items()]
PROMPT = [5, 6, 7]


def stream(scale: float = 1.0) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    for spec in SPECS:
        yield spec, TENSORS[spec.name] * scale


def sums(scale: float = 1.0) -> list[float]:
    return [float((tensor * scale).double().sum()) for tensor in TENSORS.values()]


def no_score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
    raise AssertionError("nothing is to be scored")


def remote(sender: WeightSender) -> RemoteSender:
    """Calls `sender` with what a connection leaves of arguments and results."""

    def over(data: Any) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(data))

    def call(name: str, arguments: Sequence[Any]) -> Any:
        try:
            return over(serve(sender, *over([name, arguments])))
        except Exception as error:
            raise error_from_data(over(error_as_data(error)), "the main training rank", LeaderFailed) from None

    return RemoteSender(call)


class StreamPublisher(Publisher):
    """Publishes what each call gives it."""

    make_stream: MakeStream
    score: Score

    def publish(self, version: str, make_stream: MakeStream = stream, score: Score = no_score) -> Publication:
        self.make_stream, self.score = make_stream, score
        return super().publish(version)


def publish(publisher: StreamPublisher, version: str, scale: float = 1.0, score: Score = no_score) -> tuple[str, ...]:
    """Publishes; returns the URLs that serve the version."""
    return publisher.publish(version, lambda: stream(scale), score).instances


class Publishing:
    """Creates publishers like a session, and closes them."""

    def __init__(self, loop: EventLoopThread) -> None:
        self._loop = loop
        self._closing: list[Callable[[], object]] = []

    def make(
        self,
        *instances: Any,
        wait_s: float = 0.0,
        snapshot_dir: Path | None = None,
        canary: Canary | None = None,
        source: WeightSource | None = None,
        specs: Sequence[TensorSpec] = SPECS,
        through: Sender | None = None,
        probes: bool = True,
        takes_turns: bool = False,
        num_stages: int = 1,
        **options: Any,
    ) -> tuple[StreamPublisher, InferencePool]:
        """`options` are settings of the publish section; late joiners are admitted if the options allow it.

        `source`: what is published, in place of what each call gives, whose tensors are `specs`. `through`: a sender
        that is there already. `num_stages`: so many send the stream together.
        """
        urls = tuple(instance.url for instance in instances)
        pool_section = PoolSection(instances=urls, fleet_address="127.0.0.1:1", timeout_s=20.0)
        pool = InferencePool(pool_section, takes_turns=takes_turns)
        settings = {"timeout_s": 10.0} | options
        config = PublishSection(snapshot_dir=snapshot_dir, **settings)
        admission = Admission(config, takes_turns=takes_turns)
        admission.canary = canary
        pool.late_joiners.admit = admission.admit
        rollout, noise = RolloutSection(max_response_tokens=4), noise_scale("bfloat16")
        probe = Probe(config, rollout, PROMPT, noise) if probes else None

        def stream_of_call() -> Any:
            return publisher.make_stream()

        def score_of_call(*given: Any) -> Any:
            return publisher.score(*given)

        stages = None
        if num_stages > 1:
            stages = StageSenders(specs, stream_of_call, num_stages)
            self._closing.append(stages.close)
        by_stage = None if stages is None else stages.source
        source = source or WeightSource(specs, stream_of_call, score_of_call, by_stage=by_stage)
        sender = WeightSender(source, config, "run")
        publisher = StreamPublisher(
            pool,
            self._loop,
            config,
            through or remote(sender),
            wait_s=wait_s,
            admission=admission,
            probe=probe,
            canary=canary,
            takes_turns=takes_turns,
        )
        self._closing += [sender.close, lambda: self._loop.run(pool.close())]
        return publisher, pool

    def close(self) -> None:
        for close in self._closing:
            close()
