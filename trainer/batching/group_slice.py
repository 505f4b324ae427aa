"""Groups as slices: responses that follow one prompt, the unit that a micro-batch is laid out from.

A group has one slice, with its own prompt, unless branches of its rollouts follow other prompts. A slice that is too
long for a micro-batch is split into micro-groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Group, Response


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Responses of a group that follow one prompt, by their indices, with that prompt.

    All responses that follow it (`slices_of`), or a micro-group of those of a slice that is too long.
    """

    group: Group
    prompt: TokenIds
    indices: Sequence[int]

    @property
    def responses(self) -> list[Response]:
        return [self.group.responses[i] for i in self.indices]

    @property
    def rollouts(self) -> list[int]:
        """For each response, the number of its rollout in the group."""
        rollout_of = self.group.rollout_of
        return [rollout_of[i] for i in self.indices]

    @property
    def num_rollouts(self) -> int:
        """Rollouts whose first response it has: over all slices of a group, each of its rollouts counts once."""
        rollout_of = self.group.rollout_of
        return sum(i == 0 or rollout_of[i] != rollout_of[i - 1] for i in self.indices)

    @property
    def fed_lens(self) -> tuple[int, ...]:
        """Number of rows of each response that has any."""
        return tuple(len(response.token_ids) - 1 for response in self.responses if len(response.token_ids) > 1)

    @property
    def num_rows(self) -> int:
        return len(self.prompt) + sum(self.fed_lens)


def slices_of(groups: Iterable[Group]) -> list[GroupSlice]:
    """Whole groups: a slice for each prompt that responses of a group follow."""
    return [
        GroupSlice(group, prompt, indices) for group in groups for prompt, indices in group.responses_by_prompt.items()
    ]


def num_rows(group: Group) -> int:
    """Rows that a whole group takes in a micro-batch."""
    return sum(part.num_rows for part in slices_of([group]))


def split_slice(whole: GroupSlice, max_tokens: int, *, with_prompt: bool) -> list[GroupSlice]:
    """Micro-groups of at most `max_tokens` rows, or of one response where that is longer.

    Args:
        with_prompt: whether each micro-group also has the prompt's rows; False in the second of two stages.
    """
    slices: list[GroupSlice] = []
    num_prompt_rows = len(whole.prompt) if with_prompt else 0
    start, size = 0, num_prompt_rows
    for i, response in enumerate(whole.responses):
        fed = len(response.token_ids) - 1
        if i > start and size + fed > max_tokens:
            slices.append(GroupSlice(whole.group, whole.prompt, whole.indices[start:i]))
            start, size = i, num_prompt_rows
        size += fed
    return [*slices, GroupSlice(whole.group, whole.prompt, whole.indices[start:])]
