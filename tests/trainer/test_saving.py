"""A run that ends early saves its last whole iteration, and what goes on from there is what would have been."""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import AsyncRLError, OnPolicyViolation, PublishError, RewardError, RunStopped
from async_rl.loop import train
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits
from async_rl.method.types import Batch, Group, Publication
from async_rl.records.recorder import Recorder
from tests.support.finished_groups import Arriving
from tests.support.trainer.checkpoint_worker import make_trainer, run_config
from tests.support.trainer.failing_rank_worker import RaggedRank
from tests.support.trainer.replayed_rollouts import ReplayedRolloutSource, one_by_one
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.parallel import Parallel
from trainer.saving import Saving
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

NUM_ITERATIONS = 4
FAILS_AT = 2


class Failing(Arriving):
    """Its last group never comes: what `fault` does comes instead."""

    def __init__(self, groups: Sequence[Group], fault: Callable[[], None]) -> None:
        super().__init__(groups, counts=repeat(0))
        self._fault = fault

    def ready(self, wait: bool) -> list[Group]:
        if self.num_left == 1:
            self._fault()
        return super().ready(wait)


class Rollouts(ReplayedRolloutSource):
    """The same groups in every iteration; in one of them `fault` happens."""

    def __init__(self, groups: Sequence[Group], fault: Callable[[], None] | None, stale: bool) -> None:
        super().__init__(groups, random.Random(0))
        self._fault = fault
        self._stale = stale

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: str) -> Iterator[Arriving]:
        iteration = mini_batches[0].iteration
        groups = [replace(group, iteration=iteration) for group in self._groups]
        if iteration == FAILS_AT and self._fault is not None:
            yield Failing(groups, self._fault)
        elif iteration == FAILS_AT and self._stale:
            yield one_by_one(groups[:-1], mini_batches)
        else:
            yield one_by_one(groups, mini_batches)


class Publisher:
    """Publishes to nobody; fails at one iteration, if it shall."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def publish(self, version: str, *_: Any, **__: Any) -> Publication:
        if self._fails and version.endswith(f"-{FAILS_AT}"):
            raise PublishError("no instance took the weights")
        return Publication("v0", "", (), 0, 0.0)


class Runs:
    """Runs of one model and its groups, into one directory each."""

    def __init__(self, model: Path, parallel: Parallel, groups: list[Group]) -> None:
        self._model, self._parallel, self._groups = model, parallel, groups

    def __call__(
        self,
        directory: Path,
        *,
        resume: bool = False,
        every: int = 1000,
        fault: Callable[[], None] | None = None,
        stale: bool = False,
        publish_fails: bool = False,
    ) -> dict[str, torch.Tensor]:
        """The weights at the end, which nothing else may have ended before."""
        config = run_config(
            str(self._model),
            run={"dir": str(directory), "resume": resume},
            train={"iterations": NUM_ITERATIONS, "order": "prompt"},
            checkpoint={"every": every},
            algorithm={"kl_coef": 0.1, "old_policy": "lagged"},
        )
        stop = StopSignal()
        shutdown = Shutdown(self._parallel, stop, grace_s=300.0)
        megatron: MegatronTrainer = make_trainer(config, self._parallel)
        checkpoints = Checkpoints(directory / "checkpoints", 2, self._parallel, config)
        progress = Saving(checkpoints, megatron, config.run, config.train, config.checkpoint)
        replica = RaggedRank(megatron, self._parallel, "run", Publisher(publish_fails).publish, shutdown)
        replica._num_publishes = progress.first_iteration
        rollouts = Rollouts(self._groups, fault, stale)
        ledger = Ledger(None, responses_per_prompt=1, limits=NoiseLimits(float("inf")))
        before = signal.getsignal(signal.SIGTERM)
        stop.install()
        try:
            with shutdown.saving(progress.save_last):
                train(
                    config.train,
                    replica,
                    rollouts,
                    rollouts,
                    ledger,
                    Recorder(),
                    progress.first_iteration,
                    progress.after_iteration,
                )
        finally:
            signal.signal(signal.SIGTERM, before)
            checkpoints.close()
            shutdown.close()
        return {spec.name: tensor.clone() for spec, tensor in megatron.export.stream()}


@pytest.fixture(scope="module")
def runs(tiny_model: Callable[..., Path], parallel: Parallel, ragged_groups: list[Group]) -> Runs:
    return Runs(tiny_model("qwen3", tied=True), parallel, ragged_groups)


@pytest.fixture(scope="module")
def expected(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing ended early."""
    return runs(tmp_path_factory.mktemp("uninterrupted"))


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def reward_fails() -> None:
    raise RewardError("reward 'mine', prompt row7 failed")


FAULTS: dict[str, tuple[dict[str, Any], type[AsyncRLError]]] = {
    "sigterm": ({"fault": sigterm}, RunStopped),
    "reward": ({"fault": reward_fails}, RewardError),
    "proof": ({"stale": True}, OnPolicyViolation),
    "publish": ({"publish_fails": True}, PublishError),
}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize("fault", FAULTS)
def test_the_last_whole_iteration_is_saved_and_the_run_goes_on_bit_for_bit(
    runs: Runs, expected: dict[str, torch.Tensor], tmp_path: Path, fault: str
) -> None:
    options, error = FAULTS[fault]
    with pytest.raises(error):
        runs(tmp_path, **options)
    assert names(tmp_path) == [f"iteration-{FAILS_AT:06}"]
    weights = runs(tmp_path, resume=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_model_of_fewer_iterations_is_gone_with_the_last_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """Or a run that goes on, and is killed between this checkpoint and its model, would count as finished with it."""
    (tmp_path / "model").mkdir()
    with pytest.raises(RewardError):
        runs(tmp_path, every=1, fault=reward_fails)
    assert (tmp_path / "model").exists() and len(names(tmp_path)) == 2
    runs(tmp_path, every=1, resume=True)
    assert not (tmp_path / "model").exists()


def test_what_is_saved_already_is_not_saved_twice(runs: Runs, tmp_path: Path) -> None:
    manifests: list[tuple[int, int]] = []

    def fail() -> None:
        manifest = (tmp_path / "checkpoints" / f"iteration-{FAILS_AT:06}" / "manifest.json").stat()
        manifests.append((manifest.st_ino, manifest.st_mtime_ns))
        reward_fails()

    def wait_and_fail() -> None:
        while not (tmp_path / "checkpoints" / f"iteration-{FAILS_AT:06}").is_dir():
            pass
        fail()

    with pytest.raises(RewardError):
        runs(tmp_path, every=1, fault=wait_and_fail)
    assert names(tmp_path) == ["iteration-000001", "iteration-000002"]
    manifest = (tmp_path / "checkpoints" / f"iteration-{FAILS_AT:06}" / "manifest.json").stat()
    assert manifests == [(manifest.st_ino, manifest.st_mtime_ns)]


def test_no_checkpoint_is_saved_where_checkpoints_are_off(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(RewardError):
        runs(tmp_path, every=0, fault=reward_fails)
    assert not (tmp_path / "checkpoints").exists()


def test_an_error_while_saving_does_not_hide_what_ended_the_run(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    with pytest.raises(RewardError, match="row7"):
        runs(tmp_path, fault=reward_fails)
    assert "no checkpoint of the last sound step could be saved" in caplog.text


def test_a_second_sigterm_ends_the_process_at_once_and_one_that_is_repeated_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    now = [100.0]
    monkeypatch.setattr("trainer.stop_signal.os._exit", ends.append)
    monkeypatch.setattr("trainer.stop_signal.time.monotonic", lambda: now[0])
    stop = StopSignal()
    stop.deferred = True
    stop.handle(signal.SIGTERM, None)
    now[0] += 0.5
    stop.handle(signal.SIGTERM, None)
    assert stop.is_requested and ends == []
    now[0] += 60.0
    stop.handle(signal.SIGTERM, None)
    assert ends == [143]


def test_before_anything_is_trained_sigterm_ends_the_process_as_an_exception() -> None:
    with pytest.raises(SystemExit):
        StopSignal().handle(signal.SIGTERM, None)
