"""The variants do the same work: equal samples, and equal weights at the end; a difference would be noticed."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.system.__main__ import is_sound, num_equal, summarize
from benchmarks.system.variants import VARIANTS, fastest_num_samples
from benchmarks.system.weights import MAX_DIFFERENCE, weight_difference
from benchmarks.system.work import Case
from tests.support import ROOT

ONE_RESPONSE_LESS = 0.01
"""One response of a hundred changes a mean gradient by about this part of its norm."""


@pytest.mark.distributed
def test_all_variants_train_the_same_samples_to_the_same_weights() -> None:
    numbers = {
        "prompt-tokens": 24,
        "response-tokens": 6,
        "responses": 4,
        "prompts": 3,
        "groups-at-once": 1,
        "repeats": 2,
    }
    options = [text for name, number in numbers.items() for text in (f"--{name}", str(number))]
    command = [sys.executable, "-m", "benchmarks.system", "--json", "--size", "tiny", *options]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert is_sound(found) and 0 < found["weight_difference"] <= MAX_DIFFERENCE
    assert found["same_samples"] in (1, 2, 3)
    assert list(found["variants"]) == [variant.name for variant in VARIANTS]
    assert found["token_ratio"] == pytest.approx(4 * (24 + 6) / (24 + 4 * 6), abs=1e-3)
    assert found["samples_per_micro_batch"] in (1, 2, 4)
    for figures in found["variants"].values():
        assert 0 < figures["training_s"] < figures["seconds"] and figures["speedup"] > 0


def test_other_samples_or_weights_are_noticed() -> None:
    sound = {"same_samples": 1, "weight_difference": 1e-5}
    assert is_sound(sound)
    assert not is_sound({**sound, "same_samples": 0})
    assert not is_sound({**sound, "weight_difference": ONE_RESPONSE_LESS})


def test_samples_are_the_same_up_to_the_first_iteration_in_which_one_differs() -> None:
    assert num_equal([["a", "b", "c"], ["a", "b", "c"]]) == 3
    assert num_equal([["a", "b", "c"], ["a", "b", "c"], ["a", "x", "c"]]) == 1
    assert num_equal([["a"], ["x"]]) == 0


def test_weights_are_compared_by_how_far_they_moved() -> None:
    first = {"a": torch.zeros(4), "b": torch.full((4,), 1000.0)}
    expected = {"a": torch.ones(4), "b": first["b"] + 1}
    assert weight_difference(expected, expected, first) == 0.0
    assert weight_difference({**expected, "b": expected["b"] + 0.1}, expected, first) == pytest.approx(0.1, rel=1e-3)


def test_speedups_are_medians_over_the_same_batches() -> None:
    def records(*seconds: float) -> list[dict[str, float]]:
        return [{"total_s": s, "rollout_s": 1.0, "train_s": 1.0, "publish_s": 0.0} for s in seconds]

    found = summarize({"a": records(8, 12, 40), "b": records(4, 6, 4), "c": records(2, 2, 2)})
    assert [found[name]["speedup"] for name in "abc"] == [1.0, 2.0, 6.0]
    assert [found[name]["speedup_over_previous"] for name in "abc"] == [1.0, 2.0, 2.0]


def test_fastest_micro_batch_is_searched_among_powers_of_two() -> None:
    tried: list[int] = []

    def seconds_with(num_samples: int) -> float:
        tried.append(num_samples)
        return abs(num_samples - 4) + 1.0

    assert fastest_num_samples(8, seconds_with, lambda line: None) == 4
    assert tried == [1, 2, 4, 8]


def test_token_ratio_of_the_default_case() -> None:
    assert Case("2M", 1024, 128, 16, 6, 2).token_ratio == 6.0
