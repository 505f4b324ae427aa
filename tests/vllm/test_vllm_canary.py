"""The loading canary on real vLLM: it finds the stale packed copy of a tied head, which async-rl's plugin mends.

One publish to two servers: one as it is, and one whose plugin leaves the mending out.
"""

from pathlib import Path

import pytest

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.sender import WeightSender
from tests.support.running_instance import Instance
from trainer.parallel import Parallel
from trainer.rank import TrainingRank, weight_source
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKEN = "s3cret"
PROMPT = [5, 6, 7, 8, 9, 40, 41, 3]


def test_a_stale_tied_head_is_found_and_named_and_the_mended_one_serves(
    vllm: Instance, other_vllm: Instance, vllm_model: Path, parallel: Parallel
) -> None:
    sections = (ModelSection(path=str(vllm_model)), RolloutSection(), AlgorithmSection(), OptimizerSection())
    megatron = MegatronTrainer(parallel, TrainerSection(), *sections, TrainSection(iterations=1))
    config = PublishSection(timeout_s=60.0)
    loop = EventLoopThread()
    pool = InferencePool(PoolSection(instances=(vllm.url, other_vllm.url)), TOKEN)
    canary = Canary(config, RolloutSection(), PROMPT, noise_scale("float32"), "float32")
    sender = WeightSender(weight_source(megatron, parallel, lambda: None), config, "run")
    publisher = Publisher(pool, loop, config, sender, wait_s=60.0, canary=canary)
    try:
        shutdown = Shutdown(parallel, StopSignal(), grace_s=60.0)
        publication = TrainingRank(megatron, parallel, "run", publisher.publish, shutdown).publish_weights()
        reasons = {member.url: member.reason for member in pool.members}
        kinds = set(canary.kinds.values())
    finally:
        sender.close()
        loop.run(pool.close())
        loop.close()
    assert publication.instances == (vllm.url,), reasons
    assert "computes with a stale copy of head:" in str(reasons[other_vllm.url])
    assert len(kinds) == 1 and "1 workers of torch.float32, quantization None, tensor parallel 1" in kinds.pop()
