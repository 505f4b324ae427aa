"""Random choices that are fresh in every test; TEST_SEED repeats those that it printed."""

import os
import random

import torch


def fresh_seed() -> int:
    """Torch's generator begins with it, too."""
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"TEST_SEED={seed}")
    torch.manual_seed(seed)
    return seed
