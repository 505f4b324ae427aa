"""The peak bytes of CPU tensors of a function, counted exactly from the allocator's own events."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

_ALLOCATION = "[memory]"


@dataclass(frozen=True, slots=True)
class Allocated:
    """`peak_bytes` above the level at the start, and the largest tensor; temporaries inside operators are included."""

    peak_bytes: int
    largest_bytes: int


def allocated(function: Callable[[], object]) -> Allocated:
    """Runs `function` once, slower than usual, and returns what it allocated on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        function()
    results = run.profiler and run.profiler.kineto_results
    assert results is not None, "the profiler kept no results"
    events = sorted((event for event in results.events() if event.name() == _ALLOCATION), key=lambda e: e.start_ns())
    sizes = [event.nbytes() for event in events]
    return Allocated(max(accumulate(sizes, initial=0)), max(sizes, default=0))
