"""What a failed request says about its instance. Pure; for `async_rl.pool.inference_pool`."""

from typing import Literal

from async_rl.errors import (
    BrokenAnswer,
    InstanceError,
    InstanceRefused,
    InstanceStalled,
    InstanceTooSlow,
    StaleWeights,
)

Blame = Literal["none", "pause", "lost", "barred"]
"""none: it is slow; pause: it may pass, as most faults do; lost: it makes no tokens; barred: it must not serve this
version."""

TRANSIENT = (408, 425, 429)
"""Statuses below 500 that say nothing against the instance but that it is busy."""


def blame_of(error: InstanceError) -> Blame:
    """What follows for the instance whose request ended with `error`."""
    if isinstance(error, InstanceTooSlow):
        return "none"
    if isinstance(error, InstanceStalled):
        return "lost"
    if isinstance(error, StaleWeights | BrokenAnswer):
        return "barred"
    # A refused token or a missing route will not pass.
    is_lasting = isinstance(error, InstanceRefused) and error.status < 500 and error.status not in TRANSIENT
    return "barred" if is_lasting else "pause"
