"""Attention inputs, fresh in every session (TEST_SEED repeats one)."""

import os
import random

import pytest
import torch

from tests.support.devices.attention_inputs import CPU, SHAPES, make_segments
from trainer.attention.segments import Segments


@pytest.fixture(scope="session")
def rng() -> random.Random:
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"attention inputs: TEST_SEED={seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture(params=SHAPES)
def segments(request: pytest.FixtureRequest, rng: random.Random) -> Segments:
    """Random lengths, of every shape that a micro-batch can have."""
    return make_segments(rng, request.param, CPU)
