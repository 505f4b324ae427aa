"""Requests, pauses and weight updates of the embedded engine that come between each other's steps, in this process."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from async_rl.errors import PublishError
from async_rl.shared.protocol.inference import InitInfo, SamplingParams, UpdateInfo
from async_rl.shared.weights.snapshot import SnapshotWriter
from benchmarks.common.random_model import random_model
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.model import LoadedModel
from inference_service.engine.transformers_engine import TransformersEngine
from inference_service.engine_interface import EngineFault, OutOfService, RequestRefused
from inference_service.weight_transfer.receiver import parameter_views, specs_of
from tests.support.tiny_model import FAMILIES, MODEL_SIZE

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=240, ignore_eos=True)
LIMIT_S = 60.0
"""A hang is none of a slow machine."""

NOBODY = InitInfo(
    master_address="127.0.0.1",
    master_port=1,
    secret="s" * 32,
    rank_offset=1,
    world_size=2,
    bucket_bytes=1000,
    timeout_s=0.3,
)
"""A weight group without a host."""


def run(scenario: Callable[[TransformersEngine], Awaitable[None]]) -> None:
    """Plays a scenario against an engine of its own."""

    async def play() -> None:
        loaded = LoadedModel(tiny(0), None, frozenset(), 256)
        size = plan_cache(loaded.model.config, torch.float32, torch.device("cpu"), 4, 256)
        engine = TransformersEngine(loaded, size, 256, "processed_logprobs")
        await engine.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(engine)
        finally:
            engine.close()

    asyncio.run(play())


def tiny(seed: int) -> PreTrainedModel:
    config_class, own = FAMILIES["qwen3"]
    model = random_model(config_class(**{**own, **MODEL_SIZE}), seed)
    model.eval()
    return model


def snapshot(path: Path) -> UpdateInfo:
    """Other weights than the engine's."""
    tensors = parameter_views(tiny(1))
    specs = specs_of(tensors)
    writer = SnapshotWriter(path, list(specs.values()))
    writer.write([(spec, tensors[name]) for name, spec in specs.items()])
    return UpdateInfo(
        names=list(specs),
        dtype_names=[spec.dtype_name for spec in specs.values()],
        shapes=[list(spec.shape) for spec in specs.values()],
        snapshot=str(writer.commit()),
    )


async def break_amid_an_update(engine: TransformersEngine, update: UpdateInfo) -> None:
    """Another trainer opens a group when the weights have been received, and does not get it."""
    await engine.start_weight_update()
    await engine.update_weights(update)
    with pytest.raises(PublishError):
        await engine.init_weight_transfer(NOBODY)
    assert engine.fault is not None and engine.needs_weights


def test_a_pause_does_not_wait_for_a_client_that_has_gone() -> None:
    async def scenario(engine: TransformersEngine) -> None:
        stream = engine.stream("gone", PROMPT, LONG)
        await anext(stream)
        pause = asyncio.create_task(engine.pause("wait", clear_cache=True))
        await asyncio.sleep(0)
        assert engine.is_paused and not pause.done()
        await stream.aclose()
        await pause

    run(scenario)


def test_what_has_come_to_its_end_is_not_aborted() -> None:
    async def scenario(engine: TransformersEngine) -> None:
        answer = asyncio.create_task(engine.generate("whole", PROMPT, SamplingParams(n=3, max_tokens=5)))
        await asyncio.sleep(0)
        while engine.stats().generation_tokens < 15:
            time.sleep(0.001)  # The loop does not hear of the ends meanwhile.
        engine.abort(None)
        assert [(len(choice.samples), choice.finish_reason) for choice in await answer] == [(5, "length")] * 3

    run(scenario)


def test_nothing_resumes_between_the_beginning_of_an_update_and_its_note() -> None:
    async def scenario(engine: TransformersEngine) -> None:
        await engine.pause("keep", clear_cache=True)
        started = asyncio.create_task(engine.start_weight_update())
        await asyncio.sleep(0)
        # Keeps the control thread from noting the update at once.
        busy = asyncio.create_task(engine.init_weight_transfer(NOBODY))
        await asyncio.sleep(0)
        resumed = asyncio.create_task(engine.resume())
        results = await asyncio.gather(started, busy, resumed, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), PublishError, RequestRefused]
        assert engine.is_paused

    run(scenario)


def test_a_request_that_waits_is_not_sampled_from_weights_of_a_broken_update(tmp_path: Path) -> None:
    async def scenario(engine: TransformersEngine) -> None:
        await engine.pause("wait", clear_cache=True)
        waiting = asyncio.create_task(engine.generate("waits", PROMPT, LONG))
        await break_amid_an_update(engine, snapshot(tmp_path / "weights.safetensors"))
        await engine.resume()
        with pytest.raises(OutOfService):
            await waiting

    run(scenario)


def test_a_stream_that_begins_after_an_update_broke_is_refused(tmp_path: Path) -> None:
    async def scenario(engine: TransformersEngine) -> None:
        stream = engine.stream("late", PROMPT, LONG)
        await engine.pause("wait", clear_cache=True)
        await break_amid_an_update(engine, snapshot(tmp_path / "weights.safetensors"))
        await engine.resume()
        with pytest.raises(OutOfService):
            await anext(stream)

    run(scenario)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "/" + "x" * 5000])
def test_a_snapshot_with_an_impossible_name_changes_nothing(tmp_path: Path, name: str) -> None:
    update = snapshot(tmp_path / "weights.safetensors")

    async def scenario(engine: TransformersEngine) -> None:
        await engine.pause("wait", clear_cache=True)
        await engine.start_weight_update()
        with pytest.raises(RequestRefused):
            await engine.update_weights(update.model_copy(update={"snapshot": name}))
        with pytest.raises(EngineFault, match="old ones"):
            await engine.finish_weight_update("never")
        await engine.resume()
        assert engine.fault is None and await engine.generate("still", PROMPT, SamplingParams(max_tokens=2))

    run(scenario)
