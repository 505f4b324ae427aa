"""What a node of the pipeline returns, checked: numbers of rollouts, or of the sampled tokens of responses."""

from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any

from async_rl.config.pipeline import OF_TOKENS, ROLLOUT_WEIGHTS, TOKEN_WEIGHTS
from async_rl.rollouts.rewards.base import MAX_REWARD, as_float

MAX_FACTOR = 1e6
"""Of a weight or a reward of a token, and of a weight of a rollout: products with gradients are summed in float32."""

SMALLEST_WEIGHT = 1e-6
"""Besides 0: what a batch of much smaller ones is divided by leaves nothing of float32."""


class NotNumbers(ValueError):
    """A node returned something else than it writes; says what, and what was expected."""


def numbers_of(writes: str, returned: object, num_rollouts: int, lengths: Sequence[int]) -> list[Any]:
    """A node's result: a float per rollout, or a list of floats per response.

    Args:
        lengths: the sampled tokens of each response.

    Raises:
        NotNumbers: there are more or fewer, one is not finite or too large, or a weight is negative.
    """
    if writes not in OF_TOKENS:
        return _floats(writes, returned, num_rollouts, "one per rollout")
    responses = _listed(returned, len(lengths), f"{writes}: expected {len(lengths)} lists, one per response")
    return [
        _floats(writes, values, length, f"one per sampled token of response {number}")
        for number, (values, length) in enumerate(zip(responses, lengths, strict=True))
    ]


def _floats(writes: str, returned: object, num: int, each: str) -> list[float]:
    is_weight = writes in (ROLLOUT_WEIGHTS, TOKEN_WEIGHTS)
    highest = MAX_FACTOR if is_weight or writes in OF_TOKENS else MAX_REWARD
    lowest = 0.0 if is_weight else -highest
    span = f"0 or from {SMALLEST_WEIGHT:g} to {highest:g}" if is_weight else f"from {lowest:g} to {highest:g}"
    expected = f"{writes}: expected {num} finite floats, {span}, {each}"
    values = _listed(returned, num, expected)
    floats = [as_float(value) for value in values]
    for value, number in zip(values, floats, strict=True):
        # NaN is neither.
        if not lowest <= number <= highest or (is_weight and 0 < number < SMALLEST_WEIGHT):
            raise NotNumbers(f"it returned {value!r:.200} among its values of {expected}")
    return floats


def _listed(returned: object, num: int, expected: str) -> list[Any]:
    if isinstance(returned, (str, bytes, Mapping, Set)) or not hasattr(returned, "__iter__"):
        raise NotNumbers(f"it returned {returned!r:.200} for {expected}")
    # One more is enough to detect too many: an iterator may never end.
    values = list(islice(iter(returned), num + 1))
    if len(values) != num:
        raise NotNumbers(f"it returned {'more' if len(values) > num else f'{len(values)} values'} for {expected}")
    return values
