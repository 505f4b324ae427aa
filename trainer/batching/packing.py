"""Packs groups into micro-batches of bounded size, in the order in which they may be trained."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from async_rl.loop import Window
from async_rl.method.pieces import counts_group
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Group
from trainer.batching.group_slice import GroupSlice, num_rows

T = TypeVar("T")


def pack(groups: Sequence[Group], max_tokens: int) -> list[list[Group]]:
    """Consecutive groups in micro-batches of at most `max_tokens` rows; a longer group is a micro-batch of its own."""
    return _pack(groups, [num_rows(group) for group in groups], max_tokens)


def pack_slices(slices: Sequence[GroupSlice], max_tokens: int) -> list[list[GroupSlice]]:
    """The same with slices."""
    return _pack(slices, [part.num_rows for part in slices], max_tokens)


def pack_windows(order: TrainingOrder, max_tokens: int, whole_backlog: bool) -> Iterator[Window]:
    """The windows of one mini-batch: all micro-batches that are ready if `whole_backlog`, else one.

    Waits only when nothing is ready. By index, a micro-batch is ready when the next group does not fit into it, so that
    micro-batches do not depend on the order of completion either; in order of completion, as soon as it has a group.
    Pieces of other replicas' groups, which come much later, begin a micro-batch of their own there.
    """
    pending: list[Group] = []
    # Counted once: a group may wait for many windows.
    rows: list[int] = []
    ended = False
    while True:
        rows += [num_rows(group) for group in pending[len(rows) :]]
        num_own = len(pending)
        if order.by_index:
            num_own = next((i for i, group in enumerate(pending) if not counts_group(group)), num_own)
        packed = [
            part
            for own in (slice(num_own), slice(num_own, None))
            for part in _pack(pending[own], rows[own], max_tokens)
        ]
        is_last_whole = ended or (order.has_own and num_own == len(pending))
        ready = packed[:-1] if order.by_index and not is_last_whole else packed
        if ready:
            window = ready if whole_backlog else ready[:1]
            order.begin([group for groups in window for group in groups])
            yield window
            num_taken = sum(map(len, window))
            pending, rows = pending[num_taken:], rows[num_taken:]
            if not ended:
                pending += order.next_groups(wait=False)
        elif ended:
            return
        else:
            order.begin([])
            arrived = order.next_groups(wait=True)
            ended = not arrived
            pending += arrived


def _pack(items: Sequence[T], rows: Sequence[int], max_tokens: int) -> list[list[T]]:
    """Consecutive items together as long as their rows, of which item i has `rows[i]`, are at most `max_tokens`."""
    packed: list[list[T]] = []
    size = 0
    for item, own in zip(items, rows, strict=True):
        if packed and size + own <= max_tokens:
            packed[-1].append(item)
        else:
            packed.append([item])
            size = 0
        size += own
    return packed
