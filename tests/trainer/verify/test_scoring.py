"""The hypotheses of the diagnosis on a real trainer: what it scores, in which order, and what it leaves behind."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.config.file import parse_config
from async_rl.method.types import Batch, Group
from tests.support.trainer.branched_groups import branched_groups
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer
from trainer.verify.recorded_groups import read_batch, read_share, write_share
from trainer.verify.scoring import MAX_TOKENS, Scorer, some_of_each

MakeScorer = Callable[..., tuple[Scorer, MegatronTrainer]]


@pytest.fixture
def make_scorer(parallel: Parallel, tiny_model: Callable[..., Path], tmp_path: Path) -> MakeScorer:
    def make(family: str = "qwen3", **options: int) -> tuple[Scorer, MegatronTrainer]:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tiny_model(family, **options))},
            "prompts": {"source": "rows.jsonl", "prompts_per_batch": 1},
            "reward": {"name": "math"},
            "rollout": {"temperature": 0.8},
            "optimizer": {"learning_rate": 1e-2},
            "trainer": {"micro_batch_tokens": 24},
            "train": {"iterations": 3},
        }
        config = parse_config(tree, "test")
        megatron = MegatronTrainer.of(config, parallel)
        return Scorer(config, parallel, megatron), megatron

    return make


def as_sampled(groups: Sequence[Group], logprobs_N: torch.Tensor, url: str = "http://a") -> list[Group]:
    """The groups, with these log-probs and by this instance."""
    values = iter(logprobs_N.tolist())
    return [
        replace(
            group,
            responses=tuple(
                replace(
                    response,
                    logprobs=tuple(next(values) for _ in range(response.num_sampled)),
                    instance=url,
                    turn_instances=(),
                    num_continued=0,
                )
                for response in group.responses
            ),
        )
        for group in groups
    ]


def test_scores_are_those_of_the_trainer_in_the_order_of_groups_and_responses(
    make_scorer: MakeScorer, ragged_groups: list[Group]
) -> None:
    scorer, megatron = make_scorer(tied=True)
    expected = [
        logprob
        for group in ragged_groups
        for one in megatron.score(group.prompt.token_ids, [r.token_ids for r in group.responses])
        for logprob in one
    ]
    scored = scorer.by_policy(ragged_groups, 0.8)
    # float32, in micro-batches of other rows.
    assert torch.allclose(scored, torch.tensor(expected, dtype=torch.float64), atol=1e-4)


def test_scores_of_branched_rollouts_are_those_that_the_ledger_compares(
    make_scorer: MakeScorer, rollout_groups: list[Group]
) -> None:
    scorer, megatron = make_scorer(tied=True)
    reported = as_sampled(rollout_groups, scorer.by_policy(rollout_groups, 0.8))
    rows = megatron.accumulate([[group] for group in reported])
    megatron.discard()
    assert max(row.all_gaps.largest for row in rows) < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_the_first_publish_is_another_one_after_a_step(
    make_scorer: MakeScorer, ragged_groups: list[Group], tied: bool
) -> None:
    scorer, megatron = make_scorer(tied=tied)
    assert scorer.with_first_head(ragged_groups) is None
    before = scorer.by_policy(ragged_groups, 0.8)
    megatron.accumulate([ragged_groups])
    megatron.optimizer_step()
    after = scorer.by_policy(ragged_groups, 0.8)
    stale = scorer.with_first_head(ragged_groups)
    assert stale is not None
    assert not torch.equal(stale, before) and not torch.equal(stale, after)
    assert torch.equal(after, scorer.by_policy(ragged_groups, 0.8)), "the trainer's own head is back"


def test_the_other_dtype_is_a_copy_that_leaves_the_policy_as_it_is(
    make_scorer: MakeScorer, ragged_groups: list[Group]
) -> None:
    scorer, megatron = make_scorer()
    before = [parameter.clone() for parameter in megatron.models.policy.parameters()]
    gaps = scorer.in_other_dtype(ragged_groups) - scorer.by_policy(ragged_groups, 0.8)
    assert 1e-4 < float(gaps.abs().mean()) < 0.2
    assert all(map(torch.equal, before, megatron.models.policy.parameters()))


def test_each_instance_is_diagnosed_by_the_groups_that_it_sampled_alone(
    make_scorer: MakeScorer, ragged_groups: list[Group]
) -> None:
    scorer, _ = make_scorer()
    scored = scorer.by_policy(ragged_groups, 0.8)
    groups = as_sampled(ragged_groups, scored)
    groups[1] = replace(groups[1], responses=(replace(groups[1].responses[0], instance="http://b"),) * 2)
    groups[2] = replace(groups[2], responses=tuple(replace(r, instance="http://b") for r in groups[2].responses))
    found = scorer.diagnose(groups)
    assert set(found) == {"http://a", "http://b"}
    alone = [group for i, group in enumerate(groups) if i not in (1, 2)]
    assert found["http://a"].num_tokens == sum(group.num_response_tokens for group in alone)
    assert found["http://a"].rms < 1e-4
    assert scorer.diagnose([]) == {}


def test_recorded_groups_are_read_as_they_were_without_texts_and_rows(tmp_path: Path) -> None:
    groups = branched_groups(random.Random(1))
    shares = groups[::2], groups[1::2]
    prompts = {group.index: group.prompt for group in groups}
    for replica, share in enumerate(shares):
        write_share(tmp_path / "groups", replica, Batch(4, prompts), "v-4", share)
    read = read_share(tmp_path / "groups", 4, 1)
    assert read.version == "v-4"
    assert [(g.index, g.rewards, g.rollouts) for g in read.groups] == [
        (g.index, g.rewards, g.rollouts) for g in shares[1]
    ]
    for group, original in zip(read.groups, shares[1], strict=True):
        bare = tuple(replace(response, text="") for response in original.responses)
        assert (group.index, group.rewards, group.rollouts) == (original.index, original.rewards, original.rollouts)
        assert group.responses == bare
    batch = read_batch(tmp_path / "groups", 4, None)
    assert {i: p.prompt_id for i, p in batch.prompts.items()} == {g.index: g.prompt.prompt_id for g in groups}
    write_share(tmp_path / "groups", 0, Batch(5, {}), "v-5", [])
    assert read_share(tmp_path / "groups", 5, 0).groups == []


def test_groups_are_chosen_in_the_order_of_the_batch_not_in_that_of_their_ends(ragged_groups: list[Group]) -> None:
    """Short responses finish first; early ends alone look like another temperature."""
    (template,) = as_sampled(ragged_groups[:1], torch.zeros(10**4))
    long = replace(template.responses[0], token_ids=(5,) * MAX_TOKENS, logprobs=(0.0,) * MAX_TOKENS)
    first = replace(template, index=0, responses=tuple(long for _ in template.responses))
    rest = [replace(template, index=index) for index in range(1, 9)]
    assert some_of_each([*rest, first]) == [first]
