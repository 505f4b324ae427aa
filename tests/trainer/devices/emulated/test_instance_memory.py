"""The embedded instance of a run in turns: what it has on its device in each phase is at most what the forecast says.

The emulated NPU counts tensors, so the parts of a process and an allocator that the forecast assumes are left out.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.checks.forecast.instance_memory import instance_memory, running_responses
from async_rl.checks.forecast.memory import BASE, FRAGMENTATION
from async_rl.checks.preflight.model import read_shape
from async_rl.config.sections import Config
from async_rl.shared.protocol.inference import SamplingParams, UpdateInfo
from async_rl.shared.weights.snapshot import SnapshotWriter
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.model import load_model
from inference_service.engine.transformers_engine import TransformersEngine
from inference_service.weight_transfer.receiver import parameter_views, specs_of
from tests.support.devices.emulated.process import on_emulated_npu
from tests.support.minimal_config import minimal_tree
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SIZE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
BUFFER_BYTES = 8192
PROMPTS, RESPONSES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 8, 100, 150


def make_config(model: Path) -> Config:
    sections = {
        "model": {"path": str(model), "dtype": "float32"},
        "prompts": {**minimal_tree()["prompts"], "prompts_per_batch": PROMPTS, "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": RESPONSE_TOKENS},
        "trainer": {"device": "npu"},
        "run": {**minimal_tree()["run"], "placement": "turns"},
        "publish": {"transport": "snapshot", "snapshot_dir": "/dev/shm/x"},
    }
    return Config.model_validate(minimal_tree() | sections)


class Instance:
    """An engine that begins asleep, and the peak of each phase so far, in bytes."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.peaks: dict[str, int] = {}
        self._npu: Any = torch.get_device_module("npu")
        device, longest = torch.device("npu", 0), PROMPT_TOKENS + RESPONSE_TOKENS
        with self._phase("load"):
            loaded = load_model(config.model.path, device, torch.float32, asleep=True)
            weights = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
            size = plan_cache(
                loaded.model.config, torch.float32, device, running_responses(config), longest, int, weights
            )
            self._engine = TransformersEngine(loaded, size, longest, "processed_logprobs")
        self._update = self._snapshot(loaded.model, config.model.path, folder)

    def _snapshot(self, model: torch.nn.Module, path: str, folder: Path) -> UpdateInfo:
        """Of the model at `path`, on the host."""
        tensors = parameter_views(load_model(path, torch.device("cpu"), torch.float32).model)
        specs = specs_of(tensors)
        assert specs == specs_of(parameter_views(model))
        writer = SnapshotWriter(folder / "weights.safetensors", list(specs.values()))
        writer.write((spec, tensors[name]) for name, spec in specs.items())
        return UpdateInfo(
            names=list(specs),
            dtype_names=[spec.dtype_name for spec in specs.values()],
            shapes=[list(spec.shape) for spec in specs.values()],
            snapshot=str(writer.commit()),
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._npu.reset_peak_memory_stats()
        yield
        self._npu.synchronize()
        self.peaks[name] = int(self._npu.max_memory_allocated())

    async def period(self) -> None:
        """As the producer asks for it: publish, generate, leave the device."""
        engine = self._engine
        await engine.start()
        with self._phase("publish"):
            await engine.wake_up(["weights"])
            await engine.start_weight_update()
            await engine.update_weights(self._update)
            await engine.finish_weight_update("v1")
            await engine.wake_up(["kv_cache"])
        with self._phase("generate"):
            params = SamplingParams(n=RESPONSES, max_tokens=RESPONSE_TOKENS, ignore_eos=True, seed=1)
            prompts = [[3 + i, *[5] * (PROMPT_TOKENS - 1)] for i in range(PROMPTS)]
            answers = await asyncio.gather(*(engine.generate(str(p[0]), p, params) for p in prompts))
            assert all(len(choice.samples) == RESPONSE_TOKENS for choices in answers for choice in choices)
        await engine.sleep(2)
        with self._phase("train"):
            pass
        engine.close()


@on_emulated_npu
@pytest.mark.devices
def test_an_instance_in_turns_stays_within_its_forecast_in_every_phase() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder) / "model", "qwen3", **SIZE)
        config = make_config(path)
        instance = Instance(config, Path(folder))
        asyncio.run(instance.period())
        forecast = instance_memory(config, read_shape(str(path), "model.path"))
    parts = {part.name: part.num_bytes for part in (*forecast.resident, *forecast.phases)}
    most = sum(size for name, size in parts.items() if name not in (BASE, "fragmentation"))
    peaks = instance.peaks
    shown = {name: f"{size / 2**20:.2f} MiB" for name, size in (*peaks.items(), *parts.items())}
    # Small buffers stay, such as rotary frequencies; parameters pass the device one at a time.
    largest = 4 * SIZE["hidden_size"] * SIZE["intermediate_size"]
    assert max(peaks["train"], peaks["load"] - largest) < BUFFER_BYTES, peaks
    assert parts["weights"] <= peaks["publish"] <= parts["weights"] * (1 + FRAGMENTATION), shown
    assert 0.7 * most <= peaks["generate"] <= most, shown
