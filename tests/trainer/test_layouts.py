"""Every parallel layout, in real processes over gloo, trains what one process trains."""

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import layout_worker
import pytest
import torch
from layout_worker import Job
from safetensors.torch import load_file

from async_rl.config import TrainerSection
from async_rl.types import Group
from trainer.parallel import Parallel
from trainer.passes import make_passes

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
MICRO_BATCH_TOKENS = 24
"""Makes micro-batches of one to three of the ragged groups, and splits the longest."""

LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "TP2": ("tied", {"tensor_parallel": 2}),
        "TP2 with sequence parallelism": ("untied", {"tensor_parallel": 2, "sequence_parallel": True}),
        "PP2": ("untied", {"pipeline_parallel": 2}),
        "PP2 tied, recomputed": ("tied", {"pipeline_parallel": 2, "recompute": "full"}),
        "DP2": ("tied", {}),
        "DP2 with distributed optimizer": ("untied", {"distributed_optimizer": True}),
        "EP2": ("moe", {"expert_parallel": 2}),
        "TP2 EP2": ("moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    },
    4: {
        "TP2 PP2": ("tied", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        "TP2 PP2 with sequence parallelism": (
            "untied",
            {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
        ),
        "TP2 DP2 with distributed optimizer": ("tied", {"tensor_parallel": 2, "distributed_optimizer": True}),
        "PP2 EP2": ("moe", {"pipeline_parallel": 2, "expert_parallel": 2}),
    },
}
HALF_LAYOUTS = {
    2: {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "selective"},
    4: {"pipeline_parallel": 2, "tensor_parallel": 2, "distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def checkpoints(tiny_model: Callable[..., Path]) -> dict[str, str]:
    return {
        "tied": str(tiny_model("qwen3", tied=True)),
        "untied": str(tiny_model("qwen2")),
        "moe": str(tiny_model("qwen3_moe")),
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_alone(job: Job, parallel: Parallel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What one process makes of a job: its report and the weights after it."""
    trainer = layout_worker.make_trainer(job, parallel, TrainerSection(micro_batch_tokens=10_000))
    report = layout_worker.run(job, trainer, replica=0, num_replicas=1)
    return report, {spec.name: tensor.clone() for spec, tensor in trainer.export.stream()}


def run_distributed(jobs: Sequence[Job], num_ranks: int, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "jobs").write_bytes(pickle.dumps(list(jobs)))
    subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(num_ranks), layout_worker.__file__, tmp_path / "jobs", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
        timeout=240,
        check=True,
    )
    return {job.name: json.loads((tmp_path / job.name / "report.json").read_text()) for job in jobs}


def with_logprobs(groups: Sequence[Group], parallel: Parallel, checkpoint: str) -> list[Group]:
    """The groups as if sampled from the checkpoint: with the log-probs that a single process gives them."""
    trainer = layout_worker.make_trainer(Job("", checkpoint, [], 0, {}), parallel, TrainerSection())
    (a_pass,) = make_passes([groups], parallel, 1.0, 10_000)
    with torch.no_grad():
        (logprobs,) = a_pass.logprobs(trainer.models.policy_model)
    values = iter(logprobs.tolist())
    return [
        replace(g, responses=tuple(replace(r, logprobs=tuple(next(values) for _ in r.token_ids)) for r in g.responses))
        for g in groups
    ]


def assert_same(
    name: str,
    actual: dict[str, Any],
    expected: tuple[dict[str, Any], dict[str, torch.Tensor]],
    weights: dict[str, torch.Tensor],
) -> None:
    report, expected_weights = expected
    for step, expected_step in zip(actual["steps"], report["steps"], strict=True):
        metrics, expected_metrics = step.pop("metrics"), dict(expected_step["metrics"])
        assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6), name
        assert step == pytest.approx({k: v for k, v in expected_step.items() if k != "metrics"}, rel=1e-5, abs=1e-6)
    for rows, expected_rows in zip(actual["rows"], report["rows"], strict=True):
        assert sorted(row["index"] for row in rows) == sorted(row["index"] for row in expected_rows), name
    assert max(row["max_logprob_gap"] for row in actual["rows"][0]) <= 1e-5, name
    for scores, expected_scores in zip(actual["scores"], report["scores"], strict=True):
        for row, expected_row in zip(scores, expected_scores, strict=True):
            assert row == pytest.approx(expected_row, abs=1e-4), name
    assert set(weights) == set(expected_weights)
    for tensor_name, tensor in expected_weights.items():
        torch.testing.assert_close(
            weights[tensor_name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=tensor_name: f"{name}, {n}: {text}"
        )


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", sorted(LAYOUTS))
def test_every_layout_trains_what_one_process_trains(
    num_ranks: int,
    checkpoints: dict[str, str],
    parallel: Parallel,
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    sampled = {name: with_logprobs(ragged_groups, parallel, path) for name, path in checkpoints.items()}
    jobs = [
        Job(
            name,
            checkpoints[model],
            # The second batch has an odd number of groups: replicas get shares of different sizes.
            [sampled[model], sampled[model][:0:-1]],
            free_port(),
            {"micro_batch_tokens": MICRO_BATCH_TOKENS, **layout},
        )
        for name, (model, layout) in LAYOUTS[num_ranks].items()
    ]
    expected = {
        model: run_alone(Job("", path, [sampled[model], sampled[model][1:]], 0, {}), parallel)
        for model, path in checkpoints.items()
    }
    bfloat16 = Job(
        "bfloat16", checkpoints["tied"], [sampled["tied"]], free_port(), HALF_LAYOUTS[num_ranks], dtype="bfloat16"
    )
    reports = run_distributed([*jobs, bfloat16], num_ranks, tmp_path)
    for name, (model, _) in LAYOUTS[num_ranks].items():
        assert_same(name, reports[name], expected[model], load_file(tmp_path / name / "model.safetensors"))
    # Weights and activations in bfloat16, gradients summed in float32.
    norm, expected_norm = (report["steps"][0]["grad_norm"] for report in (reports["bfloat16"], expected["tied"][0]))
    assert norm == pytest.approx(expected_norm, rel=0.05)
