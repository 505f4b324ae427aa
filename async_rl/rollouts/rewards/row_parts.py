"""Which parts of a composed reward score a prompt: those that its part of a mixture names, or its row."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.config.reward_section import RewardSection


def labels_of(config: RewardSection, row: Mapping[str, Any], of_mixture: Sequence[str] = ()) -> list[str]:
    """The labels of the parts that score the row, in the order of the config; `of_mixture` are those that the row's
    part of a mixture names.

    Raises:
        ValueError: neither this part nor the row, in `reward.column`, names them.
    """
    labels = list(config.weights)
    if of_mixture:
        return [label for label in labels if label in of_mixture]
    if config.column is None:
        return labels
    expected = f"expected {', '.join(labels)} ([[reward.parts]]), or a list of several"
    if config.column not in row:
        raise ValueError(
            f"its row has no column {config.column!r} (reward.column), which names its reward: {expected}; "
            f"it has {sorted(row)}"
        )
    value = row[config.column]
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, Sequence) or not named or not all(label in labels for label in named):
        raise ValueError(f"its row's {config.column!r} (reward.column) is {value!r:.200}: {expected}")
    return [label for label in labels if label in named]
