"""What algorithms.md says of the algorithms and their defaults is so."""

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.file import load_config
from async_rl.method.algorithms import ALGORITHMS, Algorithm, PolicyGradient, Rollouts, Totals, make_algorithm
from async_rl.method.algorithms.checking import loss_and_gradient, totals_of, whole
from async_rl.method.algorithms.random_groups import RandomGroup, any_reward, random_batch
from async_rl.method.algorithms.sapo import SAPO
from deploy.quickstart.kind import KINDS, SPELLING
from tests.support import ROOT
from tests.support.algorithms import MAX_RESPONSE_TOKENS, algorithm_of

DOCUMENT = (ROOT / "docs" / "algorithms.md").read_text()
NOTICEABLE = 0.01
"""Of a gradient: far above rounding."""


def batch_of(algorithm: Algorithm, seed: int, *, first_step: bool) -> list[RandomGroup]:
    """A random batch; at the first step the policy is the old one."""
    batch = random_batch(random.Random(seed), algorithm.needs, any_reward, max_response_tokens=MAX_RESPONSE_TOKENS)
    if not first_step:
        return batch
    return [
        replace(
            group,
            responses=tuple(
                (rollout, replace(tokens, old_logprobs_N=tokens.logprobs_N.detach()))
                for rollout, tokens in group.responses
            ),
        )
        for group in batch
    ]


def gradient(algorithm: Algorithm, batch: Sequence[RandomGroup]) -> torch.Tensor:
    _, gradients = loss_and_gradient(algorithm, [group.to(torch.float64) for group in batch], whole(batch))
    return torch.cat([each.flatten() for each in gradients])


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def rows_of_the_table() -> dict[str, list[str]]:
    found = re.findall(r"^\| \[?`(\w+)`(?:\]\(\S+\))? \| \[(.*)\|$", DOCUMENT, flags=re.MULTILINE)
    # There is an escaped one in a cell.
    return {name: re.split(r"(?<!\\)\|", rest) for name, rest in found}


def test_the_table_has_the_defaults_of_every_algorithm() -> None:
    rows = rows_of_the_table()
    assert list(rows) == list(ALGORITHMS), "docs/algorithms.md has a row for each, in the order of ALGORITHMS"
    for name, cells in rows.items():
        normalize, clip, scale = (cell.strip(' "') for cell in cells[-3:])
        cls = ALGORITHMS[name]
        if "normalize" not in cls.UNUSED:
            assert normalize.split()[0] == cls.NORMALIZE, name
        if "clip_low" in cls.UNUSED:
            assert clip.startswith("none"), name
        else:
            assert tuple(float(each) for each in clip.split(", ")) == cls.CLIP, name
        settable = "" if "scale_by_std" in cls.UNUSED else str(cls.SCALES_BY_STD).lower()
        assert scale == settable, name


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "dppo", "dapo"])
@pytest.mark.parametrize("seed", range(5))
def test_surrogates_have_grpos_gradient_where_the_ratio_is_1_and_another_one_later(name: str, seed: int) -> None:
    settings: dict[str, Any] = {"name": name, "normalize": "token"}
    grpo, other = algorithm_of(name="grpo"), algorithm_of(**settings)
    batch = batch_of(grpo, seed, first_step=True)
    assert difference(gradient(other, batch), gradient(grpo, batch)) < 1e-9
    batch = batch_of(grpo, seed, first_step=False)
    if name != "dapo":
        assert difference(gradient(other, batch), gradient(grpo, batch)) > NOTICEABLE


class Ones(PolicyGradient):
    """What a mean of advantages is multiplied by, if it is to be subtracted afterwards."""

    SCALES_BY_STD = False

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        return torch.ones(len(rollouts.rewards), dtype=torch.float64)


def test_a_batchs_mean_can_be_subtracted_afterwards_only_where_nothing_is_clipped() -> None:
    whitened = algorithm_of(name="reinforce_pp_baseline")
    centred = algorithm_of(name="grpo", scale_by_std=False)
    ones = Ones(AlgorithmSection(), MAX_RESPONSE_TOKENS)

    def off_by(seed: int, first_step: bool) -> float:
        batch = batch_of(whitened, seed, first_step=first_step)
        totals = totals_of(whitened, batch)
        mean = totals["advantages"] / totals["weighted_tokens"]
        variance = totals["advantage_squares"] / totals["weighted_tokens"] - mean**2
        scale = math.sqrt(variance * totals["weighted_tokens"] / (totals["weighted_tokens"] - 1) + 1e-8)
        afterwards = (gradient(centred, batch) - mean * gradient(ones, batch)) / scale
        return difference(afterwards, gradient(whitened, batch))

    assert max(off_by(seed, first_step=True) for seed in range(10)) < 1e-9
    assert statistics.median(off_by(seed, first_step=False) for seed in range(30)) > NOTICEABLE


def test_an_option_of_an_algorithm_is_set_on_the_command_line() -> None:
    (words,) = re.findall(r"`(--algorithm\.name [^`]*)`", DOCUMENT)
    assert words == "--algorithm.name sapo --algorithm.options.tau_negative 1.2"
    keys = words.split()
    config = load_config(
        KINDS[SPELLING].config, [f"{key}={value}" for key, value in zip(keys[::2], keys[1::2], strict=True)]
    )
    made = make_algorithm(config.algorithm, config.rollout.max_response_tokens)
    assert isinstance(made, SAPO) and made.options.tau_negative == 1.2
