"""Where a long group is cut: after so many rollouts that all replicas will have finished as soon as they can.

A group that does not fit a micro-batch runs in micro-groups, one after the other. Near the end of a mini-batch the
other replicas would wait for them. A cut costs the prompt, which the piece and the rest both compute; it is made only
where it ends the mini-batch earlier by more than the time of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from async_rl.method.pieces import may_be_cut
from async_rl.method.types import Group


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica still has to train, in tokens, and how many of them it trains in a second (or in any unit)."""

    tokens: float
    speed: float = 1.0

    @property
    def seconds(self) -> float:
        return self.tokens / self.speed


def num_tokens(group: Group) -> int:
    """What training a group costs: its prompt's tokens, once, and those of its responses with prompts of their own."""
    own = sum(len(response.prompt_ids) for response in group.responses if response.prompt_ids is not None)
    return len(group.prompt.token_ids) + own + sum(len(response.token_ids) for response in group.responses)


def num_rollouts_for(group: Group, own: Load, others: Sequence[Load], waiting: float = 0.0) -> int:
    """How many of a group's rollouts, the first ones, a replica gets; all of them if the group is not to be cut.

    The others get the rest, and share it and the `waiting` tokens of other groups as if these could be divided.

    Args:
        own: of the replica that gets the piece.
        others: of those that may get the rest.
    """
    size = len(group.rollouts)
    if not others or not may_be_cut(group):
        return size
    prompt, costs = len(group.prompt.token_ids), [0] * size
    for rollout, response in zip(group.rollout_of, group.responses, strict=True):
        costs[rollout] += len(response.token_ids)
    so_far = [0, *accumulate(costs)]
    left, speed = sum(load.tokens for load in others) + waiting, sum(load.speed for load in others)
    slowest_s = max(load.seconds for load in others)

    def end_s(num_rollouts: int) -> float:
        rest = 0 if num_rollouts == size else prompt + so_far[size] - so_far[num_rollouts]
        own_s = (own.tokens + prompt + so_far[num_rollouts]) / own.speed
        return max(own_s, (left + rest) / speed, slowest_s)

    # Of equal ends the one with the least rest: single rollouts are not divided, which the ends do not show.
    best = min(range(size - 1, 0, -1), key=end_s)
    return best if end_s(size) - end_s(best) > prompt / own.speed else size
