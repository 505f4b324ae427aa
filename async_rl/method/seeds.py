"""Derives all random choices of a run from `run.seed`, one rule per use.

A use is named by its purpose and the values that distinguish two draws of that purpose, joined by "/" as in
"group/SEED/ITERATION/INDEX"; its seed is the first bits of the SHA-256 of that name. Changing these rules would give a
run that resumes from a checkpoint other prompts and samples than an uninterrupted run.
"""

import hashlib
import random
from array import array

RESPONSE_BITS = 10
"""Response j of a request is sampled with the request's seed + j, and a request has at most 1024 responses."""

SAMPLING_BITS = 63
"""Inference servers take a signed integer of 64 bits."""


def group_seed(run_seed: int, iteration: int, index: int) -> int:
    """The sampling seed of the group at `index` of its batch; see `_sampling_seed`."""
    return _sampling_seed("group", run_seed, iteration, index)


def rollout_seed(run_seed: int, iteration: int, index: int, number: int) -> int:
    """The seed of one rollout of a program: of all its turns, and for the program's own choices."""
    return derive_seed("rollout", run_seed, iteration, index, number, num_bits=SAMPLING_BITS)


def turn_seed(rollout_seed: int, context_digest: str, occurrence: int) -> int:
    """The sampling seed of a turn: by what it follows, so that it does not depend on the order in which turns arrive.

    `occurrence` counts the rollout's turns after the same tokens.
    """
    return _sampling_seed("turn", rollout_seed, context_digest, occurrence)


def evaluation_seed(run_seed: int, set_name: str, prompt_id: str) -> int:
    """The sampling seed of an evaluated prompt: the same in every iteration, so that only the weights differ."""
    return _sampling_seed("evaluation", run_seed, set_name, prompt_id)


def evaluation_rollout_seed(run_seed: int, set_name: str, prompt_id: str, number: int) -> int:
    """The seed of one rollout of a program on an evaluated prompt: the same in every iteration, too."""
    return derive_seed("evaluation rollout", run_seed, set_name, prompt_id, number, num_bits=SAMPLING_BITS)


def evaluation_rows_seed(run_seed: int) -> int:
    """The seed of the rows drawn from a reasoning-gym task for evaluation, in [0, 2^31)."""
    return derive_seed("evaluation rows", run_seed, num_bits=31)


def prompt_order(run_seed: int, epoch: int, num_rows: int, part: str = "") -> "array[int]":
    """The numbers 0 to `num_rows` - 1 in the order of an epoch; those of a mixture's part in an order of its own."""
    order = array("q", range(num_rows))
    # Python's own seeding from a string, which differs from `derive_seed`.
    random.Random(_name("prompts", run_seed, *([part] if part else []), epoch)).shuffle(order)
    return order


def mixed_places(run_seed: int, iteration: int, num_places: int) -> list[int]:
    """The numbers 0 to `num_places` - 1 in the order in which a batch of a mixture has the places of its schedule."""
    places = list(range(num_places))
    random.Random(_name("mixture", run_seed, iteration)).shuffle(places)
    return places


def derive_seed(*use: object, num_bits: int) -> int:
    """The seed of a use, in [0, 2^num_bits)."""
    digest = hashlib.sha256(_name(*use).encode()).digest()
    return int.from_bytes(digest, "big") >> 8 * len(digest) - num_bits


def _sampling_seed(*use: object) -> int:
    """In [0, 2^63); the range of 1024 seeds overlaps that of another request only by chance, 2^-53."""
    return derive_seed(*use, num_bits=SAMPLING_BITS - RESPONSE_BITS) << RESPONSE_BITS


def _name(*use: object) -> str:
    return "/".join(map(str, use))
