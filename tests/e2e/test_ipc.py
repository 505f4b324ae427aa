"""Pools that share devices, on a CPU, with weights through mapped memory: the same bits, faults, and nothing left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.shared.weights.ipc import FILE_NAME
from tests.support.local_run import Run
from tests.support.same_run import assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(600)]

SETTINGS = (
    "--run.placement=shared",
    "--train.iterations=6",
    "--train.order=prompt",
    "--checkpoint.every=1",
    "--train.exact=true",
    "--algorithm.kl_coef=0.05",
)


@pytest.fixture(scope="module")
def with_a_file(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Run:
    run = Run(tmp_path_factory.mktemp("snapshot"), tiny_model("qwen3", tied=True))
    return run.train(*SETTINGS, "--publish.transport=snapshot", f"--publish.snapshot_dir={run.dir.parent}/snapshots")


def test_it_trains_the_bits_of_a_snapshot_whatever_is_killed_and_leaves_nothing_in_shared_memory(
    with_a_file: Run, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    run.start(*SETTINGS, "--publish.transport=ipc", "--inference.num_instances=2")
    run.wait_for_iterations(1)
    mapped = [each for each in run.instances() if FILE_NAME in Path(f"/proc/{each.pid}/maps").read_text()]
    assert len(mapped) == 2, "it is really the way"
    mapped[0].kill()
    run.wait_for_iterations(3)
    run.kill_trainer()
    assert run.finish() == 0, run.everything_said()
    assert_same_run(run, with_a_file)
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(("async-rl", "torch_"))]
