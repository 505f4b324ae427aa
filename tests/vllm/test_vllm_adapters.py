"""Adapters that are published alone to real vLLM: it samples from those of each version, and what takes none is named.

One publish goes to a server that was started for adapters, and to one that was not.
"""

from pathlib import Path

import pytest
import torch

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.probe import Probe
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.routes import GENERATE, LOAD_ADAPTER
from async_rl.shared.weights.sender import WeightSender
from tests.support.running_instance import Instance
from tests.vllm.conftest import StartVllm
from trainer.hf.adapters import save_adapters
from trainer.model.adapters import adapters_of
from trainer.parallel import Parallel
from trainer.rank import TrainingRank, adapter_info, weight_source
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKEN = "s3cret"
PROMPT = [5, 6, 7, 8, 9, 40, 41, 3]
ADAPTER = AdapterSection(rank=4, alpha=8)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_vllm_samples_from_the_adapters_of_each_version_and_one_that_takes_none_is_named(
    start_vllm: StartVllm, vllm: Instance, vllm_model: Path, parallel: Parallel, tmp_path: Path, workers: int
) -> None:
    sections = (ModelSection(path=str(vllm_model)), RolloutSection(), AlgorithmSection(), OptimizerSection())
    megatron = MegatronTrainer(
        parallel, TrainerSection(), *sections, TrainSection(iterations=1), ADAPTER, publishes_adapters=True
    )
    config, rollout, noise = PublishSection(timeout_s=60.0), RolloutSection(), noise_scale("float32")
    loop = EventLoopThread()
    info = adapter_info(megatron, parallel, ADAPTER)
    sender = WeightSender(weight_source(megatron, parallel, lambda: None, info), config, "run")
    shutdown = Shutdown(parallel, StopSignal(), grace_s=60.0)
    options = ("--enable-lora", "--max-lora-rank", "8", "--tensor-parallel-size", str(workers))
    with start_vllm(*options) as able:
        pool = InferencePool(PoolSection(instances=(able.url, vllm.url)), TOKEN)
        canary = Canary(config, rollout, PROMPT, noise, "float32")
        probe = Probe(config, rollout, PROMPT, noise)
        publisher = Publisher(pool, loop, config, sender, wait_s=60.0, canary=canary, probe=probe)
        rank = TrainingRank(megatron, parallel, "run", publisher.publish, shutdown)
        try:
            for number in range(3):
                publication = rank.publish_weights()
                reasons = {member.url: str(member.reason) for member in pool.members}
                assert publication.instances == (able.url,), reasons
                assert publication.num_workers == workers
                assert "started without --enable-lora" in reasons[vllm.url]
                models = [model["id"] for model in able.client.get("/v1/models").json()["data"]]
                assert models == ["tiny", publication.version], "the old one is unloaded"
                member = next(member for member in pool.members if member.url == able.url)
                samples = loop.run(probe.ask(member.client, publication.version))
                for tokens, logprobs in samples:
                    (expected,) = megatron.score(PROMPT, [tokens])
                    assert list(logprobs) == pytest.approx(expected, abs=1e-4), number
                with torch.no_grad():
                    for adapter in adapters_of(megatron.models.policy_model).values():
                        for factor in adapter.parameters():
                            factor.add_(0.2 * torch.randn_like(factor))
            assert_loads_what_is_exported(able, megatron, tmp_path / "exported", str(vllm_model))
        finally:
            sender.close()
            loop.run(pool.close())
            loop.close()
            # Left out of the publishes, it was not told to go on; other tests use it.
            vllm.client.post("/resume").raise_for_status()


def assert_loads_what_is_exported(able: Instance, megatron: MegatronTrainer, path: Path, base: str) -> None:
    """The directory of `async-rl export`, by vLLM's own route; its adapters were in no publish."""
    save_adapters(megatron.models.policy_model, ADAPTER, base, path)
    able.client.post(LOAD_ADAPTER, json={"lora_name": "exported", "lora_path": str(path)}).raise_for_status()
    sampling = {"max_tokens": 16, "n": 4, "logprobs": 0, "seed": 1, "ignore_eos": True}
    answer = able.client.post(GENERATE, json={"model": "exported", "token_ids": PROMPT, "sampling_params": sampling})
    for choice in answer.raise_for_status().json()["choices"]:
        own = [token["logprob"] for token in choice["logprobs"]["content"]]
        (expected,) = megatron.score(PROMPT, [choice["token_ids"]])
        assert own == pytest.approx(expected, abs=1e-4)
