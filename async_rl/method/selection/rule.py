"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), by index: which groups of a batch with a reserve are trained.

A group has a signal if the rewards of its rollouts differ. Of a share with quota q those q groups are trained that have
a signal and the lowest indices. If fewer than q have one, groups without a signal fill the quota, by index too; they
are run forward only, and a step always has the same number of groups. Nothing depends on the order of completion.

The groups are gone through by index until q with a signal were found. Those passed over are left out; those after the
last one are not needed, whether they have finished or not. Used while training (`finished_groups.py`), and on what was
recorded (`proof.py`).
"""

from collections.abc import Sequence
from itertools import takewhile

from async_rl.method.types import Batch, have_signal


class Selection:
    """What the groups known so far decide about one leader's share of a batch."""

    def __init__(self, share: Batch) -> None:
        self._indices = sorted(share.prompts)
        self._quota = share.num_trained
        self._signals: dict[int, bool] = {}

    def add_group(self, index: int, rewards: Sequence[float]) -> None:
        """A group of the share has finished."""
        self._signals[index] = have_signal(rewards)

    def certain(self) -> set[int]:
        """The groups that are trained whatever the rewards of the others will be."""
        found: set[int] = set()
        num_without = sum(not signal for signal in self._signals.values())
        may_have_signal = len(self._indices) - num_without
        before = 0
        for place, index in enumerate(self._indices):
            signal = self._signals.get(index)
            if signal and place - before < self._quota:
                found.add(index)
            elif signal is False:
                if may_have_signal + before < self._quota:
                    found.add(index)
                before += 1
        return found

    def in_order(self) -> list[int]:
        """The trained groups, those with a signal first, each by index, as far as no other can come in between."""
        known = list(takewhile(self._signals.__contains__, self._indices))
        selected = [index for index in known if self._signals[index]][: self._quota]
        if len(known) == len(self._indices):
            selected += [index for index in known if not self._signals[index]]
        return selected[: self._quota]

    @property
    def is_decided(self) -> bool:
        """Whether it is known which groups are trained."""
        return len(self.in_order()) == self._quota

    def left_out(self) -> list[int]:
        """Once it is decided, the groups that were passed over; all that follow are not needed."""
        selected = set(self.in_order())
        is_filled = any(not self._signals[index] for index in selected)
        last = self._indices[-1] if is_filled else max(selected, default=-1)
        return [index for index in self._indices if index <= last and index not in selected]
