"""Attention inputs."""

import random

import pytest

from tests.support.devices.attention_inputs import CPU, SHAPES, make_segments
from trainer.attention.segments import Segments


@pytest.fixture(params=SHAPES)
def segments(request: pytest.FixtureRequest, rng: random.Random) -> Segments:
    """Random lengths, of every shape that a micro-batch can have."""
    return make_segments(rng, request.param, CPU)
