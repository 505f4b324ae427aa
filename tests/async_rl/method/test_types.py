import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from async_rl.method.group_proof import GroupProof
from async_rl.method.types import UNPROVEN, Batch, Prompt, RewardParts, RolloutFacts, WeightSpan, num_correct
from tests.support.groups import make_group, make_response


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        (((("v1", 0, 3)),), {"v1"}),
        ((("v1", 0, 1), ("v2", 1, 3)), {"v1", "v2"}),
        ((), {UNPROVEN}),
        ((("v1", 0, 2),), {"v1", UNPROVEN}),
        ((("v1", 1, 3),), {"v1", UNPROVEN}),
        ((("v1", 0, 1), ("v1", 2, 3)), {"v1", UNPROVEN}),
        ((("v1", 0, 4),), {"v1", UNPROVEN}),
    ],
)
def test_a_version_is_proven_only_by_spans_that_cover_every_token(
    spans: tuple[tuple[str, int, int], ...], versions: set[str]
) -> None:
    response = make_response((5, 6, 7), weight_spans=[WeightSpan(*span) for span in spans])
    assert response.weight_versions == versions


@pytest.mark.parametrize(
    ("observed", "sampled"),
    [((), [0, 1, 2, 3, 4]), (((0, 2),), [2, 3, 4]), (((1, 2), (3, 4)), [0, 2, 4]), (((0, 1), (2, 4)), [1, 4])],
)
def test_sampled_tokens_are_those_outside_the_observed_ranges(
    observed: tuple[tuple[int, int], ...], sampled: list[int]
) -> None:
    one = make_response((5, 6, 7, 8, 9), observed=observed)
    assert list(one.sampled) == [i for run in one.sampled_ranges for i in run] == sampled
    assert one.num_sampled == len(sampled)


def test_versions_are_proven_by_spans_over_the_sampled_tokens() -> None:
    one = make_response((5, 6, 7), observed=((0, 2),), weight_spans=(WeightSpan("v1", 0, 1),))
    assert one.weight_versions == {"v1"}
    assert replace(one, weight_spans=(WeightSpan("v1", 0, 3),)).weight_versions == {"v1", UNPROVEN}


def test_responses_are_rollouts_of_one_turn_unless_told_otherwise() -> None:
    one = make_group(3, [make_response((5,)), make_response((6, 7), finish_reason="length")])
    assert one.rollouts == (RolloutFacts(), RolloutFacts(status="truncated"))
    assert (one.rollout_of, one.rollout_lengths, one.num_response_tokens) == ((0, 1), (1, 2), 3)


def test_a_rollouts_length_is_that_of_all_its_responses() -> None:
    responses = make_response((5, 6)), make_response((5, 8, 9), observed=((0, 2),)), make_response((7,))
    one = make_group(3, responses, rewards=(0.0, 1.0), rollouts=(RolloutFacts(num_responses=2), RolloutFacts()))
    assert (one.rollout_of, one.rollout_lengths) == ((0, 0, 1), (3, 1))


def test_equal_prompts_are_one_also_if_a_response_names_that_of_the_group() -> None:
    prompts = (None, (4,), (1, 2), (4, 5), (4,))
    one = make_group(3, [make_response((5,), prompt_ids=prompt) for prompt in prompts], prompt=(1, 2))
    assert one.responses_by_prompt == {(1, 2): [0, 2], (4,): [1, 4], (4, 5): [3]}
    assert GroupProof.of(one, {}).num_prompt_tokens == 5


def test_parts_of_a_reward_pass_with_the_row_and_have_a_value_for_each_rollout() -> None:
    one = replace(make_group(3, [make_response((5,)), make_response((6,))]), reward_parts=(("math", (1.0, 0.0)),))
    row = GroupProof.of(one, {})
    assert GroupProof.from_json(json.loads(json.dumps(asdict(row)))) == row and row.reward_parts == one.reward_parts
    with pytest.raises(AssertionError, match="1 of 'math', 2 rollouts"):
        replace(one, reward_parts=(("math", (1.0,)),))


def test_correct_are_those_of_the_first_part_that_says_so() -> None:
    parts: RewardParts = (("format", (1.0, 1.0)), ("math", (0.5, 1.0)), ("code", (0.0, 0.0)))
    rewards = (1.5, 2.0)
    assert num_correct({"code": 0.0, "math": 1.0}, rewards, parts) == 1
    assert num_correct({"judge": 1.0}, rewards, parts) is None
    assert (num_correct(2.0, rewards, parts), num_correct(None, rewards, parts)) == (1, None)


def test_rows_of_older_releases_are_read() -> None:
    row = GroupProof.of(make_group(3, [make_response((5,)), make_response((6,))]), {})
    new = ("num_turns", "num_branches", "num_truncated", "reward_parts", "num_corrected")
    older = {name: value for name, value in json.loads(json.dumps(asdict(row))).items() if name not in new}
    assert GroupProof.from_json(older) == replace(row, num_turns=0)
    assert GroupProof.from_json(older).num_rollouts == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts": (RolloutFacts(),)}, "1 of 2 responses have a rollout"),
        ({"rollouts": (RolloutFacts(num_responses=2),), "rewards": (0.0, 1.0)}, "2 rewards, 1 rollouts"),
        ({"rollouts": (RolloutFacts(num_responses=2), RolloutFacts(num_responses=0))}, "rollout 1 of group 3 has no"),
        ({"rewards": (0.0,)}, "1 rewards, 2 rollouts"),
    ],
)
def test_a_group_whose_rollouts_responses_and_rewards_do_not_fit_is_our_own_mistake(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        make_group(3, [make_response((5,)), make_response((6,))], **options)


def test_shares_of_a_batch_are_disjoint_and_complete() -> None:
    batch = Batch(3, {i: Prompt(str(i), (1,), {}) for i in range(7)})
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert [sorted(share.prompts) for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert all(share.iteration == 3 for share in shares)
