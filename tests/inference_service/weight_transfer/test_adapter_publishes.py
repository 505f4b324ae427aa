"""Publishes of adapters alone to several embedded engines, of which some begin with another base."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from async_rl.config.adapter_section import AdapterSection
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.adapter import WEIGHTS_FILE
from async_rl.shared.protocol.inference import AdapterInfo
from async_rl.shared.weights.fingerprint import TensorSpec, base_digest
from async_rl.shared.weights.sender import AdapterSource, WeightSource
from inference_service.weight_transfer.receiver import parameter_views, specs_of
from tests.inference_service.weight_transfer.test_weight_update import assert_serves
from tests.support.publishing import Publishing
from tests.support.running_instance import Instance
from tests.support.trainer.random_adapters import random_adapters

pytestmark = pytest.mark.distributed

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture
def publishing() -> Iterator[Publishing]:
    loop = EventLoopThread()
    made = Publishing(loop)
    yield made
    made.close()
    loop.close()


def source_of(base: torch.nn.Module, factors: Tensors, adapter: AdapterSection) -> WeightSource:
    """Of a trainer with these adapters beside this base."""

    def stream_of(tensors: Tensors) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        specs = specs_of(tensors)
        yield from ((specs[name], tensor) for name, tensor in tensors.items())

    whole = parameter_views(base)
    info = AdapterInfo(rank=adapter.rank or 0, alpha=adapter.alpha, base=base_digest(stream_of(whole)))
    alone = AdapterSource(list(specs_of(factors).values()), lambda: stream_of(factors), info)
    return WeightSource(list(specs_of(whole).values()), lambda: stream_of(whole), adapter=alone)


@pytest.fixture
def published(
    tiny_model: Callable[..., Path], load_reference: Callable[[Path], torch.nn.Module], tmp_path: Path
) -> tuple[WeightSource, Any]:
    """A trainer's random adapters beside their base, and peft's model of both."""
    adapter = random_adapters(tiny_model("qwen3"), tmp_path / "adapters")
    assert adapter.path is not None
    both = PeftModel.from_pretrained(load_reference(tiny_model("qwen3")), adapter.path)
    factors = load_file(adapter.path / WEIGHTS_FILE)
    return source_of(load_reference(tiny_model("qwen3")), factors, adapter), both


@pytest.mark.parametrize("transport", ["broadcast", "snapshot"])
def test_of_two_instances_the_one_with_another_base_gets_it_and_both_compute_with_the_adapters(
    transport: str,
    publishing: Publishing,
    published: tuple[WeightSource, Any],
    launch_instance: Callable[..., Instance],
    tiny_model: Callable[..., Path],
    reference: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    source, both = published
    instances = [launch_instance(tiny_model("qwen3")), launch_instance(tiny_model("qwen3", seed=1))]
    options = {"transport": transport, "snapshot_dir": tmp_path / "snapshots"}
    publisher, pool = publishing.make(*instances, source=source, timeout_s=30.0, **options)
    for version in ("run-0", "run-1"):
        served = publisher.publish(version).instances
        assert served == tuple(instance.url for instance in instances), [member.reason for member in pool.members]
        for instance in instances:
            assert_serves(instance, both, version, reference)


@pytest.mark.parametrize("amid", ["base", "adapters"])
def test_one_that_is_killed_amid_a_stream_leaves_the_other_with_the_base_and_the_adapters(
    amid: str,
    publishing: Publishing,
    published: tuple[WeightSource, Any],
    launch_instance: Callable[..., Instance],
    tiny_model: Callable[..., Path],
    reference: Callable[..., list[float]],
) -> None:
    source, both = published
    instances = [launch_instance(tiny_model("qwen3", seed=1)) for _ in range(2)]

    def killing(stream: Iterator[tuple[TensorSpec, torch.Tensor]]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        yield next(stream)
        instances[0].process.kill()
        instances[0].process.wait()
        yield from stream

    assert source.adapter is not None
    of_base, of_adapters = source.stream, source.adapter.stream
    if amid == "base":
        source = replace(source, stream=lambda: killing(iter(of_base())))
    else:
        source = replace(source, adapter=replace(source.adapter, stream=lambda: killing(iter(of_adapters()))))
    publisher, pool = publishing.make(*instances, source=source, timeout_s=30.0)
    for version in ("run-0", "run-1"):
        served = publisher.publish(version).instances
        assert served == (instances[1].url,), [member.reason for member in pool.members]
        assert_serves(instances[1], both, version, reference)
