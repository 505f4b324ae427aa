"""An iteration of one replica, in small steps of time: the reference for pools that slow each other down."""

import math
from collections.abc import Sequence

from deploy.scaling.simulation import Costs, SetUp, Shape, finish_times

STEP_S = 0.001


def walked(
    groups: Sequence[Shape], costs: Costs, set_up: SetUp, step_s: float = STEP_S
) -> tuple[list[float], list[tuple[int, float, float]]]:
    """When each group finishes, and each window as (index of its only group, start, end), in seconds."""
    alone, is_synchronous = finish_times(groups, costs, set_up), set_up.schedule == "synchronous"
    finished, windows = [math.inf] * len(groups), list[tuple[int, float, float]]()
    left = list(range(len(groups)))
    rolled, now_s, trains, until = 0.0, 0.0, -1, 0.0
    while len(windows) < len(groups):
        is_rolling = any(each == math.inf for each in finished)
        waiting = [place for place in left if finished[place] <= now_s and not (is_synchronous and is_rolling)]
        if trains < 0 and waiting:
            trains = max(waiting, key=lambda place: groups[place].num_rows)
            left.remove(trains)
            began_s, until = now_s, costs.window_s + groups[trains].num_rows * costs.row_s
        now_s += step_s
        rolled += step_s / (costs.slower_decoding if trains >= 0 else 1)
        if trains >= 0:
            until -= step_s / (costs.slower_training if is_rolling else 1)
            if until <= 0:
                windows.append((trains, began_s, now_s))
                trains = -1
        for place, at in enumerate(alone):
            if finished[place] == math.inf and at <= rolled:
                finished[place] = now_s
    return finished, windows
