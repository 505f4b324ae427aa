"""Packs groups into micro-batches of bounded size, in the order in which they may be trained."""

from collections.abc import Iterator, Sequence

from async_rl.loop import Window
from async_rl.training_order import TrainingOrder
from async_rl.types import Group
from trainer.batching.shared_prompt import num_rows


def pack(groups: Sequence[Group], max_tokens: int) -> list[list[Group]]:
    """Consecutive groups in micro-batches of at most `max_tokens` rows; a longer group is a micro-batch of its own."""
    packed: list[list[Group]] = []
    size = 0
    for group in groups:
        rows = num_rows(group)
        if packed and size + rows <= max_tokens:
            packed[-1].append(group)
        else:
            packed.append([group])
            size = 0
        size += rows
    return packed


def pack_windows(order: TrainingOrder, max_tokens: int, whole_backlog: bool) -> Iterator[Window]:
    """The windows of one mini-batch: all micro-batches that are ready if `whole_backlog`, else one.

    Waits only when nothing is ready. By index, a micro-batch is ready when the next group does not fit into it, so that
    micro-batches do not depend on the order of completion either; in order of completion, as soon as it has a group.
    """
    pending: list[Group] = []
    ended = False
    while True:
        packed = pack(pending, max_tokens)
        ready = packed[:-1] if order.by_index and not ended else packed
        if ready:
            window = ready if whole_backlog else ready[:1]
            yield window
            pending = pending[sum(map(len, window)) :]
            if not ended:
                pending += order.take(wait=False)
        elif ended:
            return
        else:
            arrived = order.take(wait=True)
            ended = not arrived
            pending += arrived
