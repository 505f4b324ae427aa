"""What a failed request means for its instance. Pure; for `async_rl.pool.inference_pool`."""

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
"""none: it is slow; pause: the fault may be temporary, as most are; lost: it generates no tokens; barred: it must not
serve this version."""

TRANSIENT = (408, 425, 429)
"""Statuses below 500 that mean only that the instance is busy."""


def blame_of(error: InstanceError) -> Blame:
    """The consequence for the instance whose request ended with `error`."""
    if isinstance(error, InstanceTooSlow):
        return "none"
    if isinstance(error, InstanceStalled):
        return "lost"
    if isinstance(error, StaleWeights | BrokenAnswer):
        return "barred"
    # A refused token or a missing route is not temporary.
    is_lasting = isinstance(error, InstanceRefused) and error.status < 500 and error.status not in TRANSIENT
    return "barred" if is_lasting else "pause"
