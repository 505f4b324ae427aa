"""How far two checkpoints are from each other."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.verify.distance import distance


def save(path: Path, *shards: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for number, tensors in enumerate(shards):
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


def test_figures_are_over_all_tensors_however_they_are_divided_among_files(tmp_path: Path) -> None:
    start = save(tmp_path / "start", {"a": torch.zeros(2), "b": torch.zeros(2)})
    first = save(tmp_path / "first", {"a": torch.tensor([1.0, 2.0])}, {"b": torch.tensor([3.0, 4.0])})
    second = save(tmp_path / "second", {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 2.0])})
    assert distance(first, second, start) == {
        "num_weights": 4,
        "num_different": 1,
        "largest": 2.0,
        "rms": 1.0,
        "rms_of_change": pytest.approx(math.sqrt(18 / 4)),
        "rms_of_weights": pytest.approx(math.sqrt(18 / 4)),
    }


def test_bfloat16_and_tensors_that_the_start_lacks_are_read(tmp_path: Path) -> None:
    start = save(tmp_path / "start", {"a": torch.ones(3)})
    one = save(tmp_path / "one", {"a": torch.ones(3, dtype=torch.bfloat16), "head": torch.ones(1)})
    figures = distance(one, one, start)
    assert figures["num_weights"] == 3 and figures["rms"] == figures["rms_of_change"] == 0.0


def test_a_weight_that_is_no_number_is_no_small_distance(tmp_path: Path) -> None:
    sound, broken = ({"a": torch.tensor([1.0, value])} for value in (1.0, math.nan))
    first, second = save(tmp_path / "first", broken), save(tmp_path / "second", sound)
    figures = distance(first, second, second)
    assert math.isnan(figures["rms"]) and not figures["rms"] <= 1.0
