"""Two training ranks, mostly a replica each, of which one fails; for `test_failing_rank.py`, which starts this as a
program.

Arguments: the checkpoint of a model, pickled groups, a directory. Each scenario has a pair of forked ranks, and a
directory of its own in which each rank reports its error, or what it has trained; a rank that hangs is killed, and
reports nothing.
"""

import hashlib
import json
import os
import pickle
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ProducerLost, RewardError, RunStopped, WriteFailed
from async_rl.loop import train
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits
from async_rl.method.types import Batch, Group, Publication
from async_rl.records.recorder import IterationRecord, Recorder
from tests.support.finished_groups import Arriving
from tests.support.trainer.checkpoint_worker import make_trainer, run_config
from tests.support.trainer.replayed_rollouts import ReplayedRolloutSource, one_by_one
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.rank import TrainingRank
from trainer.recovery import Recovery
from trainer.saving import Saving
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

NUM_ITERATIONS = 3
FAILS_AT = 1
HANG_S = 150
"""A scenario takes about 2 s."""
GRACE_S = 1000.0
"""A time limit that no scenario may need."""
WAIT_S = 2.0
"""For a rank that trains three groups: a tenth of a second."""


@dataclass(frozen=True)
class Scenario:
    """What fails, and with which settings. Faults of records and checkpoints are the main rank's."""

    fault: str
    fails_at: int = FAILS_AT
    every: int = 1000
    sections: dict[str, Any] = field(default_factory=dict)


ONE_REPLICA = {"trainer": {"tensor_parallel": 2}}
TOTALS = {"algorithm": {"name": "reinforce_pp_baseline"}, "train": {"mode": "synchronous"}}
SCENARIOS = {
    "rollouts": Scenario("rollouts"),
    "rollouts, while the other waits for totals": Scenario("rollouts", sections=TOTALS),
    "nothing": Scenario("nothing"),
    "producer": Scenario("producer"),
    "nothing in one replica": Scenario("nothing", sections=ONE_REPLICA),
    "producer of one replica": Scenario("producer", sections=ONE_REPLICA),
    "proof": Scenario("proof"),
    "record": Scenario("record"),
    "last record": Scenario("record", fails_at=NUM_ITERATIONS - 1),
    "end while a publish waits": Scenario("publish"),
    "directory of a checkpoint": Scenario("directory", every=1),
    "name of a checkpoint": Scenario("lease", every=1),
}


OF_ROLLOUTS = {"rollouts": RewardError("no such column"), "producer": ProducerLost("the producer has ended")}
"""What the leader of the last replica raises."""


class Failing(Arriving):
    """Its last group never comes, which is known when the other rank has all of its own."""

    def __init__(self, groups: list[Group], error: AsyncRLError) -> None:
        super().__init__(groups, counts=repeat(0))
        self._error = error

    def ready(self, wait: bool) -> list[Group]:
        if self.num_left == 1:
            time.sleep(WAIT_S)
            raise self._error
        return super().ready(wait)


class Rollouts(ReplayedRolloutSource):
    """The loop's prompts and rollouts: the same groups in every iteration, in order; `errors` of some, once each."""

    def __init__(self, groups: list[Group], parallel: Parallel, errors: dict[int, AsyncRLError]) -> None:
        super().__init__(groups, random.Random())
        self._parallel = parallel
        self._errors = errors

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: str) -> Iterator[Arriving]:
        iteration, parallel = mini_batches[0].iteration, self._parallel
        groups = [
            replace(group, iteration=iteration)
            for group in self._groups
            if group.index % parallel.num_replicas == parallel.dp_rank
        ]
        error = self._errors.pop(iteration, None)
        yield one_by_one(groups, mini_batches) if error is None else Failing(groups, error)


class Publisher:
    """Publishes to nobody; the publish of number `ends_at`, counted from 0, ends with the run."""

    def __init__(self, ends_at: int) -> None:
        self._ends_at = ends_at

    def publish(self, version: str, *_: Any, **__: Any) -> Publication:
        if version == f"run-{self._ends_at}":
            raise RunStopped("told to end")
        return Publication("v0", "", (), 0, 0.0)


class RaggedRank(TrainingRank):
    """Groups of any size count as whole."""

    def accumulate(self, window: Any) -> list[GroupProof]:
        return [replace(row, num_responses=1, rewards=row.rewards[:1]) for row in super().accumulate(window)]


class FailingRecorder(Recorder):
    """Writes nothing, and fails at one iteration."""

    def __init__(self, fails_at: int) -> None:
        self._fails_at = fails_at

    def end_iteration(self, record: IterationRecord, publication: Publication) -> None:
        if record.iteration == self._fails_at:
            raise WriteFailed("cannot write metrics.jsonl")


def failing_call(number: int) -> Callable[[], None]:
    """A function whose call of this number, counted from 0, fails."""
    calls = iter(range(10**6))

    def call() -> None:
        if next(calls) == number:
            raise WriteFailed("cannot write a file")

    return call


def run_rank(scenario: Scenario, config: Config, groups: list[Group]) -> str:
    """Trains; returns what ended it."""
    parallel = init_parallel(choose_device("cpu"), 3, config.trainer)
    shutdown = Shutdown(parallel, StopSignal(), GRACE_S)
    megatron = make_trainer(config, parallel)
    fault = scenario.fault if parallel.is_main else ""
    directory = config.run.dir / "checkpoints"
    if fault == "directory":
        directory.write_text("in the way")
    require_lease = failing_call(2 * scenario.fails_at + 1 if fault == "lease" else -1)
    checkpoints = Checkpoints(directory, 2, parallel, config, require_lease=require_lease)
    saving = Saving(checkpoints, megatron, config.run, config.train, config.checkpoint)
    publisher = Publisher(scenario.fails_at if fault == "publish" else -1)
    rank = RaggedRank(megatron, parallel, "run", publisher.publish if parallel.is_main else None, shutdown)
    is_last_leader = parallel.is_leader and parallel.dp_rank == parallel.num_replicas - 1
    error = OF_ROLLOUTS.get(scenario.fault) if is_last_leader else None
    rollouts = Rollouts(groups, parallel, {} if error is None else {scenario.fails_at: error})
    path = config.run.dir / "ledger.jsonl" if parallel.is_main else None
    fails_to_prove = failing_call(scenario.fails_at if fault == "proof" else -1)
    ledger = Ledger(path, 1, NoiseLimits(float("inf")), fails_to_prove)
    recorder = FailingRecorder(scenario.fails_at if fault == "record" else -1)
    restart = (lambda iteration: ["", iteration, ""]) if parallel.is_main else None

    def train_from(iteration: int) -> None:
        train(config.train, rank, rollouts, rollouts, ledger, recorder, iteration, saving.after_iteration)
        shutdown.synchronize(may_stop=False)

    try:
        with shutdown.saving(saving.save_last):
            Recovery(parallel, shutdown, megatron, saving, None, restart, 1.0).train(train_from)
        said = digest_of(megatron)
    except AsyncRLError as error:
        said = f"{type(error).__name__}: {error}"
    shutdown.close()
    return said


def digest_of(megatron: MegatronTrainer) -> str:
    """Of this rank's part of the weights."""
    digest = hashlib.sha256()
    for parameter in megatron.models.policy_model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_scenario(name: str, model: str, groups: list[Group], directory: Path) -> None:
    scenario = SCENARIOS[name]
    directory.mkdir()
    train_section = {"iterations": NUM_ITERATIONS, **scenario.sections.get("train", {})}
    config = run_config(
        model,
        run={"dir": str(directory)},
        checkpoint={"every": scenario.every},
        train=train_section,
        trainer=scenario.sections.get("trainer", {}),
        algorithm=scenario.sections.get("algorithm", {}),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = {}
    for rank in range(2):
        child = os.fork()
        if child:
            ranks[child] = rank
            continue
        signal.alarm(HANG_S)
        # The environment that torchrun sets for its ranks.
        os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
        torch.set_num_threads(1)
        (directory / f"rank-{rank}.json").write_text(json.dumps(run_rank(scenario, config, groups)))
        # Without closing anything: the other rank must not wait for it any more.
        os._exit(0)
    for child in ranks:
        os.waitpid(child, 0)


def hang(directory: Path) -> None:
    """A rank whose save hangs after an error that no restart mends; writes its exit code."""
    child = os.fork()
    if child == 0:
        parallel = init_parallel(choose_device("cpu"), 3, run_config("unused").trainer)
        shutdown = Shutdown(parallel, StopSignal(), 0.5)
        with shutdown.saving(lambda: time.sleep(HANG_S)):
            raise WriteFailed("cannot write a file")
    (directory / "hang.json").write_text(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def main(model: str, groups_file: Path, directory: Path) -> None:
    groups = pickle.loads(groups_file.read_bytes())
    for name in SCENARIOS:
        run_scenario(name, model, groups, directory / name)
    hang(directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
