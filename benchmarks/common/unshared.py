"""Groups without sharing, as samples with a prompt each: what benchmarks compare shared prompts with."""

from collections.abc import Sequence

from async_rl.method.types import Group
from trainer.batching.group_slice import GroupSlice, slices_of


def samples_of(groups: Sequence[Group]) -> list[GroupSlice]:
    """A slice for each response."""
    return [GroupSlice(part.group, part.prompt, [i]) for part in slices_of(groups) for i in part.indices]
