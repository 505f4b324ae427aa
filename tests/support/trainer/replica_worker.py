"""One rank of `test_rank.py`, started by torchrun: publishes from a divided model without instances.

Arguments: the checkpoint, the output directory.
"""

import json
import sys
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import torch

from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Publication
from async_rl.shared.weights.sender import WeightSource
from tests.support.trainer.layout_worker import Job, make_trainer
from trainer.devices import choose_device
from trainer.parallel import init_parallel
from trainer.rank import TrainingRank, weight_source
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal

PROMPT, RESPONSES = [3, 4, 5], [(6, 7), (8,), (9, 10, 11)]


class TwoTries:
    """Replaces the publisher: an attempt that breaks, a complete one, and a probe."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.scores: list[list[float]] = []
        self.num_tensors = 0

    def publish(self, version: str) -> Publication:
        broken = self._source.stream()
        assert isinstance(broken, Generator)
        next(broken)
        broken.close()
        self.num_tensors = sum(1 for _ in self._source.stream())
        assert self.num_tensors == len(self._source.specs)
        self.scores = self._source.score(PROMPT, RESPONSES)
        return Publication(version, "fingerprint", ("http://a", "http://b"), 8, 0.5)


def main(checkpoint: str, out: Path) -> None:
    torch.set_num_threads(1)
    section = TrainerSection(pipeline_parallel=2)
    parallel = init_parallel(choose_device("cpu"), 0, section)
    trainer = make_trainer(Job("", checkpoint, [], {}), parallel, section)
    publisher = TwoTries(weight_source(trainer, parallel, lambda: None)) if parallel.is_main else None
    shutdown = Shutdown(parallel, StopSignal(), 60.0)
    replica = TrainingRank(trainer, parallel, "run", publisher.publish if publisher else None, shutdown)
    publications = [asdict(replica.publish_weights()) for _ in range(2)]
    report = {"publications": publications, "scores": publisher.scores if publisher else None}
    (out / f"rank{parallel.rank}.json").write_text(json.dumps(report))
    parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
