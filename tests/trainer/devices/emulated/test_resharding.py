"""From the trainer's layout to that of the instances: what a publish takes on each device of the trainer."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.forecast.rank_parameters import Shares, rank_parameters
from async_rl.checks.preflight.model import read_shape
from async_rl.config.trainer_section import TrainerSection
from async_rl.shared.model_shape import ModelShape
from tests.support.devices.emulated import environment
from tests.support.devices.emulated.build import lacking

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(900)]

WORKER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MODULE = "tests.support.devices.emulated.resharding_worker"
PARCEL_BYTES = 2**18
WIDTH = 4
"""Bytes of a value, in float32."""

SIZE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "TP2 DP2": ("qwen3", 4, {"tensor_parallel": 2}),
    "EP2": ("qwen3_moe", 2, {"expert_parallel": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_publish_in_turns_takes_a_rank_two_parcels_beside_its_part_and_leaves_nothing(
    name: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    family, num_ranks, layout = LAYOUTS[name]
    out = tmp_path / "reports.json"
    words = [str(tiny_model(family, tied=False, **SIZE)), json.dumps(layout), str(PARCEL_BYTES), str(out)]
    subprocess.run(
        [sys.executable, *WORKER, str(num_ranks), "-m", MODULE, *words],
        env=environment.emulated_environment(tmp_path),
        check=True,
        timeout=600,
    )
    reports: list[dict[str, Any]] = json.loads(out.read_text())
    assert len(reports) == num_ranks
    shape = read_shape(Path(words[0]))
    shares = Shares.of(TrainerSection(**layout), num_ranks)
    part, parcel = WIDTH * rank_parameters(shape, shares).total, max(PARCEL_BYTES, WIDTH * largest_of(shape))
    for each in reports:
        beside = each["peak"] - each["part"]
        print(f"{name}: {each}, {beside / parcel:.2f} parcels beside the part")
        assert each["part"] == part < each["whole"] == WIDTH * shape.num_parameters
        assert 0 <= beside <= 2 * parcel
        # What it computes with beside its weights: tables of rotary embeddings, and the kernels' masks.
        assert abs(each["after"] - each["left"]) <= parcel


def largest_of(shape: ModelShape) -> int:
    """Values of the largest entry of a parcel: gate and up projections together, or of one expert."""
    size = shape.ffn_size if shape.experts is None else shape.experts.ffn_size
    return max(2 * shape.hidden_size * size, shape.hidden_size * shape.vocab_size)
