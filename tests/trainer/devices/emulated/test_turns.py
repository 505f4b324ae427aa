"""Runs whose pools share one emulated device in turns: no moment with both, the same bits, faults at every stage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.devices.emulated.environment import peaks_of_all
from tests.support.same_run import assert_same_run
from tests.trainer.devices.emulated.conftest import EmulatedRun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SETTINGS = ("--train.order=prompt", "--algorithm.kl_coef=0.05", "--checkpoint.every=1")


def snapshot(run: EmulatedRun) -> tuple[str, ...]:
    return "--publish.transport=snapshot", f"--publish.snapshot_dir={run.folder}/snapshots"


@pytest.fixture(scope="module")
def separate(emulated_run: Callable[..., EmulatedRun], tmp_path_factory: pytest.TempPathFactory) -> EmulatedRun:
    usage = tmp_path_factory.mktemp("separate") / "usage"
    run = emulated_run("separate", shared=usage)
    return run.train(*SETTINGS, *snapshot(run))


@pytest.fixture(scope="module")
def in_turns(emulated_run: Callable[..., EmulatedRun], tmp_path_factory: pytest.TempPathFactory) -> EmulatedRun:
    usage = tmp_path_factory.mktemp("turns") / "usage"
    run = emulated_run("turns", shared=usage)
    return run.train(*SETTINGS, *snapshot(run), "--run.placement=turns")


def test_it_trains_the_same_bits_as_on_two_devices(in_turns: EmulatedRun, separate: EmulatedRun) -> None:
    print([peaks_of_all(Path(r.run.environment["EMULATED_NPU_SHARED"]))[:2] for r in (in_turns, separate)])
    assert_same_run(in_turns.run, separate.run)
