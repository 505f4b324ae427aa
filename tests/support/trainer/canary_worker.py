"""One rank of `test_canary.py`, started by torchrun: changes a divided model's weights, scores, and restores them.

Arguments: a JSON list of [name, checkpoint, trainer section, adapter section], the output directory. With adapters
these are published alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Publication
from async_rl.shared.protocol.sender import CONSTANT, SCALE
from async_rl.shared.weights.fingerprint import Fingerprint
from async_rl.shared.weights.sender import WeightSource
from tests.support.trainer.layout_worker import Job, make_trainer
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.rank import TrainingRank, adapter_info, weight_source
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

PROMPT, RESPONSES = [3, 4, 5, 60], [(6, 7, 33), (8,), (9, 10, 11, 90)]


def strengths_of(classes: tuple[str, ...]) -> dict[str, int]:
    """A strength for each class; a tied head has the embedding's."""
    found = {name: 1 + i % 3 for i, name in enumerate(classes)}
    return found | ({"head": found["embedding"]} if "head" in found else {})


class CanaryOnly:
    """Replaces the publisher: reads the stream, changes, reads and scores, and returns the given publication."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.fingerprints: list[str] = []
        self.scores: dict[str, Any] = {}

    def publish(self, version: str) -> Publication:
        source = self._source

        def read() -> None:
            fingerprint = Fingerprint()
            for stream in (source.stream, *([source.adapter.stream] if source.adapter else ())):
                for spec, tensor in stream():
                    fingerprint.add(spec, tensor.contiguous().view(-1).view(torch.uint8))
            self.fingerprints.append(fingerprint.hexdigest())

        read()
        every = strengths_of(tuple(source.classes))
        source.change(every)
        read()
        self.scores["changed"] = source.score(PROMPT, RESPONSES)
        if source.adapter:
            self.scores["base"] = source.adapter.info.base
            source.change(every | {SCALE: 150})
            self.scores["scaled"] = source.score(PROMPT, RESPONSES)
        for stale in ("head", "embedding", "o", "o_proj lora_A", "q_proj lora_B"):
            source.change({name: strength for name, strength in every.items() if name != stale})
            self.scores[stale] = source.score(PROMPT, RESPONSES)
        kinds = ("k", "o", "gate", "up", "down", "lora_B")
        constant = [name for name in source.classes if name.split()[-1] in kinds]
        source.change(every | dict.fromkeys(constant, CONSTANT))
        self.scores["constant"] = source.score(PROMPT, RESPONSES)
        source.change({})
        read()
        # The weights are changed when the publish ends: every rank restores its own.
        source.change(every)
        return Publication(version, "fingerprint", ("http://a",), 8, 0.5)


def report(megatron: MegatronTrainer, parallel: Parallel, adapter: dict[str, Any]) -> dict[str, Any]:
    """Publishes twice; returns the results on this rank."""
    info = adapter_info(megatron, parallel, AdapterSection(**adapter))
    publisher = CanaryOnly(weight_source(megatron, parallel, lambda: None, info)) if parallel.is_main else None
    shutdown = Shutdown(parallel, StopSignal(), grace_s=60.0)
    replica = TrainingRank(megatron, parallel, "run", publisher.publish if publisher else None, shutdown)
    for _ in range(2):
        replica.publish_weights()
    return {"fingerprints": publisher.fingerprints, "scores": publisher.scores} if publisher else {}


def job_of(checkpoint: str, options: dict[str, Any], adapter: dict[str, Any]) -> Job:
    return Job("", checkpoint, [], options, adapter=adapter, publishes_adapters=bool(adapter))


def main(cases: str, out: Path) -> None:
    torch.set_num_threads(1)
    reports = {}
    for name, checkpoint, options, adapter in json.loads(cases):
        section = TrainerSection(**options)
        parallel = init_parallel(choose_device("cpu"), 0, section)
        trainer = make_trainer(job_of(checkpoint, options, adapter), parallel, section)
        reports[name] = report(trainer, parallel, adapter)
        # All layouts in one process group: ranks that use torchrun's store again find the previous addresses in it.
        parallel_state.destroy_model_parallel()
        dist.init_process_group = lambda *args, **options: None
    if parallel.is_main:
        (out / "report.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
