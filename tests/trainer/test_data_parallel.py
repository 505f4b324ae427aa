"""Two replicas, two real processes under torchrun, train what one process trains."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.types import Group
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
WORKER = Path(__file__).with_name("dp_worker.py")


@pytest.mark.distributed
def test_two_replicas_with_uneven_shares_equal_one_process(
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    checkpoint = tiny_model("qwen3", tied=True)
    batches = [[ragged_groups[:1], ragged_groups[1:]], [ragged_groups[2:5], ragged_groups[:2]]]
    (tmp_path / "batches").write_bytes(pickle.dumps(batches))
    subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", WORKER, checkpoint, tmp_path / "batches", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    reports = [json.loads((tmp_path / f"report{i}.json").read_text()) for i in range(2)]

    single = make_trainer(checkpoint, kl_coef=0.1, learning_rate=1e-2)
    for number, shares in enumerate(batches):
        for group in [*shares[0], *shares[1]]:
            single.accumulate(group)
        expected = asdict(single.optimizer_step())
        for report in reports:
            step = report["steps"][number]
            assert step.pop("metrics") == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)
            assert step == pytest.approx({k: v for k, v in expected.items() if k != "metrics"}, rel=1e-5, abs=1e-6)
            assert report["rows"][number] == [group.index for share in shares for group in share]
    saved = load_file(tmp_path / "policy" / "model.safetensors")
    for spec, tensor in single.weights()[1]:
        torch.testing.assert_close(saved[spec.name], tensor, rtol=1e-5, atol=1e-5)

    for replica, report in enumerate(reports):
        assert (report["replica"], report["num_replicas"]) == (replica, 2)
        assert report["gathered"] == [{"replica": 0, "text": ""}, {"replica": 1, "text": "é"}]
        assert report["broadcast"] == ["from", 1, "from", 1]


def test_process_without_torchrun_is_its_own_only_replica(parallel: Parallel) -> None:
    assert (parallel.replica, parallel.num_replicas, parallel.is_main) == (0, 1, True)
    assert parallel.gather_json({"a": [1, None]}) == [{"a": [1, None]}]
    assert parallel.broadcast_json("x") == "x"
