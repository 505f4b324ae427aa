"""Pieces of a long group: some of its rollouts, for a replica of the trainer to train beside others.

A group's gradient is a sum over its rollouts, so replicas can add up parts of it. What depends on all of its rollouts,
advantages and what the batch is divided by, is in `Group.whole`; totals are counted with the piece that has the first
rollout. Each piece has the prompt, which is computed in each of them. Cut by `async_rl.producer.dock`, and made one
again in the proof (`group_proof.join_pieces`).
"""

from dataclasses import replace

from async_rl.method.types import Group, RewardParts, WholeGroup


def may_be_cut(group: Group) -> bool:
    """Whether it has several rollouts, all of whose responses follow the group's own prompt: branches may not, and what
    they follow would be computed again with each."""
    return len(group.rollouts) > 1 and list(group.responses_by_prompt) == [group.prompt.token_ids]


def counts_group(group: Group) -> bool:
    """Whether what is counted once for a group is counted with this one: it is whole, or its first piece."""
    return group.first_rollout == 0


def cut(group: Group, num_rollouts: int) -> tuple[Group, Group]:
    """The first so many rollouts of a group, or of a piece, and the others."""
    size = len(group.rollouts)
    assert 0 < num_rollouts < size, f"a group of {size} rollouts is cut after {num_rollouts}"
    return _piece(group, 0, num_rollouts), _piece(group, num_rollouts, size)


def _piece(group: Group, begin: int, end: int) -> Group:
    whole = group.whole or WholeGroup(
        first_rollout=0,
        rewards=group.rewards,
        rollout_lengths=group.rollout_lengths,
        truncated=group.truncated,
        reward_parts=group.reward_parts,
        weights=group.weights,
    )
    first, *others = [
        response for response, rollout in zip(group.responses, group.rollout_of, strict=True) if begin <= rollout < end
    ]

    def own(parts: RewardParts) -> RewardParts:
        return tuple((label, values[begin:end]) for label, values in parts)

    return replace(
        group,
        # The first response has the prompt's routes.
        responses=(replace(first, prompt_routes=group.responses[0].prompt_routes), *others),
        rewards=group.rewards[begin:end],
        rollouts=group.rollouts[begin:end],
        reward_parts=own(group.reward_parts),
        reward_metrics=own(group.reward_metrics),
        whole=replace(whole, first_rollout=whole.first_rollout + begin),
    )
