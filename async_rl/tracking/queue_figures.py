"""How finished groups waited for their window; for `recorder`."""

from collections.abc import Collection
from statistics import fmean

from async_rl.tracking.timeline import GroupTimes


def queue_figures(times: Collection[GroupTimes]) -> dict[str, float]:
    """The mean wait, and the most groups that waited at the same time; 0 where no group has times."""
    waits = [each.train_started_s - each.finished_s for each in times]
    arrivals = [(each.finished_s, 1) for each in times]
    departures = [(each.train_started_s, -1) for each in times]
    most = waiting = 0
    # A group that arrives when another one leaves has not met it.
    for _, change in sorted(arrivals + departures):
        waiting += change
        most = max(most, waiting)
    return {"queue_wait_s_mean": fmean(waits) if waits else 0.0, "queue_groups_max": most}
