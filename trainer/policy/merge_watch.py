"""Whether what adapters have learned is still there after they were merged into the weights that are published.

A weight has the dtype of the model there. What an adapter adds to one in bfloat16 is lost where it is below about a
512th of the weight, and a run whose every change is lost would train on rollouts of the base.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from async_rl.errors import UpdatesRoundedAway
from trainer.model.adapters import adapters_of
from trainer.model.gpt import RankModel

MAX_UNCHANGED = 10
"""Publishes in a row after which a matrix that has an update, and not one value to show for it, ends the run."""

Merges = Mapping[str, Sequence[int]]
"""Megatron matrix, under its stage -> (values that the last merge changed, all values, whether B is not 0)."""


class MergeWatch:
    """Of one rank's policy; all ranks call `merged_share` with the same `Merges`."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._unchanged: Counter[str] = Counter()

    def merges_of_rank(self) -> Merges:
        """Of the last publish, in which not all ranks merge; waits once for the device."""
        merged = {
            name: each.last_merge for name, each in adapters_of(self._model).items() if each.last_merge is not None
        }
        if not merged:
            return {}
        counts, stage = torch.stack(list(merged.values())).tolist(), self._model.parallel.pp_rank
        return {f"stage {stage}, {name}": each for name, each in zip(merged, counts, strict=True)}

    def merged_share(self, of_ranks: Iterable[Merges], *, is_new: bool) -> dict[str, float]:
        """The metric `merged_share`: of the values of all matrices with adapters, those that differ from the base.

        Args:
            is_new: whether there was a publish since the last call.

        Raises:
            UpdatesRoundedAway: a matrix has been the base, bit for bit, in too many publishes in a row.
        """
        sums: dict[str, Sequence[int]] = {}
        for merges in of_ranks:
            for name, counts in merges.items():
                sums[name] = [a + b for a, b in zip(counts, sums.get(name, (0, 0, 0)), strict=True)]
        if not sums:
            return {}
        for name, (changed, _, has_update) in sums.items():
            if is_new:
                self._unchanged[name] = self._unchanged[name] + 1 if has_update and not changed else 0
            if self._unchanged[name] == MAX_UNCHANGED:
                raise UpdatesRoundedAway(
                    f"the adapter of {name} has an update, but none of its values is left in the published weights "
                    f"after rounding, for {MAX_UNCHANGED} publishes: the instances generate without it; "
                    "raise optimizer.learning_rate and resume; or set model.dtype to 'float32', or raise "
                    "adapter.alpha, with run.accept_changes = true, or in a run of its own"
                )
        changed, values, _ = map(sum, zip(*sums.values(), strict=True))
        return {"merged_share": changed / values}
