"""Every layout streams the checkpoint's own bytes, in the same order, and no rank ever gathers the model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.checks.preflight.model import read_shape
from trainer.hf.weight_map import weight_map

pytestmark = pytest.mark.distributed
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
WORKER = ("-m", "tests.support.trainer.export_worker")

SMALL_BUCKET = 3_000
BIG_BUCKET = 2 * 2**20
MOST_BYTES = 16 * 2**20
"""A rank may hold the parcel at hand, a part of it and the parcel before; the rest is what the process needs itself."""

BIG_DENSE = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 20}
BIG_EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 24}
TP2, PP2, EP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2}
VPP2 = {**PP2, "virtual_pipeline_parallel": 2}
CP2 = {"context_parallel": 2}


def run_cases(num_ranks: int, cases: list[dict[str, Any]], directory: Path) -> list[list[dict[str, Any]]]:
    """Runs all cases in one launch of `num_ranks` processes; the reports of each rank, case by case."""
    for case in cases:
        case["checkpoint"] = str(case["checkpoint"])
    (directory / "cases.json").write_text(json.dumps(cases))
    subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(num_ranks), *WORKER, directory / "cases.json", directory],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    return [json.loads((directory / f"reports{rank}.json").read_text()) for rank in range(num_ranks)]


def require_original_streams(reports: list[list[dict[str, Any]]], cases: list[dict[str, Any]], directory: Path) -> None:
    for number, case in enumerate(cases):
        checkpoint = Path(case["checkpoint"])
        in_order = [name for entry in weight_map(read_shape(checkpoint)) for name in entry.hf_shapes]
        assert all(of_rank[number]["names"] == in_order for of_rank in reports), case
        assert reports[0][number]["wrong"] == [], case
        assert [of_rank[number]["wrong by stage"] for of_rank in reports] == [[]] * len(reports), case
        senders = senders_of(case["layout"], len(reports), read_shape(checkpoint).family)
        assert [of_rank[number]["senders"] for of_rank in reports] == [senders] * len(reports), case
        original = load_file(checkpoint / "model.safetensors")
        saved = load_file(directory / str(number) / "model.safetensors")
        assert set(saved) == set(original), case
        assert all(torch.equal(saved[name], original[name]) for name in original), case


def senders_of(layout: dict[str, int], num_ranks: int, family: str) -> list[int]:
    """The first rank of each stage, and those with experts of their own that give it no parts of other tensors."""
    num_stage_ranks = num_ranks // layout.get("pipeline_parallel", 1)
    others = range(layout.get("tensor_parallel", 1), layout.get("expert_parallel", 1) if family != "gpt_oss" else 0)
    return [first + number for first in range(0, num_ranks, num_stage_ranks) for number in (0, *others)]


def test_no_rank_holds_more_than_a_parcel_at_a_time(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"checkpoint": tiny_model("qwen3", tied=True, **BIG_DENSE), "layout": PP2, "bucket_bytes": BIG_BUCKET},
        {"checkpoint": tiny_model("qwen3_moe", **BIG_EXPERTS), "layout": EP2, "bucket_bytes": BIG_BUCKET},
        {"checkpoint": tiny_model("qwen3", **BIG_DENSE), "layout": TP2, "bucket_bytes": BIG_BUCKET},
    ]
    reports = run_cases(2, cases, tmp_path)
    require_original_streams(reports, cases, tmp_path)
    for number, case in enumerate(cases):
        for of_rank, peak in zip(reports, reports[0][number]["peak_bytes"], strict=True):
            assert of_rank[number]["num_bytes"] > 2 * MOST_BYTES
            assert peak <= MOST_BYTES, case


@pytest.mark.nightly
def test_two_ranks_stream_the_original_bytes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"checkpoint": tiny_model("llama"), "layout": {}, "bucket_bytes": SMALL_BUCKET},
        {"checkpoint": tiny_model("qwen2", tied=True), "layout": TP2, "bucket_bytes": 1},
        {"checkpoint": tiny_model("deepseek_v3"), "layout": PP2, "bucket_bytes": SMALL_BUCKET},
        # Neighbouring layers are on different ranks.
        {"checkpoint": tiny_model("qwen3", tied=True, num_hidden_layers=5), "layout": VPP2, "bucket_bytes": BIG_BUCKET},
        {"checkpoint": tiny_model("glm4_moe", num_hidden_layers=4), "layout": VPP2, "bucket_bytes": SMALL_BUCKET},
        {"checkpoint": tiny_model("qwen3_moe"), "layout": {**CP2, **EP2}, "bucket_bytes": SMALL_BUCKET},
        {"checkpoint": tiny_model("qwen3_next"), "layout": TP2, "bucket_bytes": SMALL_BUCKET},
        {"checkpoint": tiny_model("qwen3_5_text", num_key_value_heads=1), "layout": TP2, "bucket_bytes": 1},
        {"checkpoint": tiny_model("olmo3"), "layout": TP2, "bucket_bytes": SMALL_BUCKET},
        {"checkpoint": tiny_model("gemma3_text", tied=True), "layout": PP2, "bucket_bytes": SMALL_BUCKET},
        # The experts of a layer are one tensor, of which either rank has a half.
        {"checkpoint": tiny_model("gpt_oss"), "layout": {**TP2, **EP2}, "bucket_bytes": BIG_BUCKET},
        {"checkpoint": tiny_model("gpt_oss", tied=True), "layout": EP2, "bucket_bytes": SMALL_BUCKET},
    ]
    require_original_streams(run_cases(2, cases, tmp_path), cases, tmp_path)


@pytest.mark.nightly
def test_four_ranks_stream_the_original_bytes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    models = [
        ("qwen3", True, {**TP2, **PP2}),
        ("qwen2", False, {**TP2, **PP2}),
        ("llama", False, PP2),
        ("qwen3_moe", False, {**TP2, **EP2}),
        ("qwen3_moe", True, {**TP2, **PP2, **EP2}),
        ("qwen3_moe", False, {"expert_parallel": 4}),
        ("qwen3_moe", False, {**TP2, "expert_parallel": 4}),
        ("deepseek_v3", False, {**TP2, **PP2, **EP2}),
        ("qwen2", False, {**TP2, **CP2}),
        ("qwen3", True, {**CP2, **PP2}),
        ("qwen3_moe", False, {**TP2, **CP2, "expert_parallel": 4}),
        ("glm4_moe", True, {**TP2, **PP2, **EP2}),
        ("qwen3_next", False, {**TP2, **PP2, **EP2}),
        ("qwen3_5_text", True, {**TP2, **PP2}),
        ("gpt_oss", False, {**TP2, **PP2, **EP2}),
        ("gpt_oss", True, {**TP2, **CP2, "expert_parallel": 4}),
        ("minimax_m2", False, {**TP2, **PP2, **EP2}),
    ]
    cases = [
        {"checkpoint": tiny_model(family, tied=tied), "layout": layout, "bucket_bytes": SMALL_BUCKET}
        for family, tied, layout in models
    ]
    require_original_streams(run_cases(4, cases, tmp_path), cases, tmp_path)
