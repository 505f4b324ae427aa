"""What the trainer relies on, on random groups: `pytest test_my_algorithm.py`."""

import torch
from my_algorithm import MedianBaseline

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.method.algorithms import Rollouts
from async_rl.method.algorithms.checking import check_algorithm

NAME = "python:my_algorithm.py:MedianBaseline"


def test_it_streams() -> None:
    for options in ({}, {"below": 0.0}):
        config = AlgorithmSection(name=NAME, options=options)
        check_algorithm(MedianBaseline(config, 16), max_response_tokens=16)


def test_what_is_below_the_median_counts_half() -> None:
    rollouts = Rollouts(rewards=(0.0, 1.0, 3.0), lengths=(1, 1, 1), truncated=(False,) * 3)
    advantages_G = MedianBaseline(AlgorithmSection(name=NAME), 16).advantages(rollouts, None)
    assert torch.equal(advantages_G, torch.tensor([-0.5, 0.0, 2.0], dtype=torch.float64))
