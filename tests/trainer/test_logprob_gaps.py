"""Gaps of real groups: by instance, equal to an independent sum however the group was split; and stale weights."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.gap_limits import NoiseLimits, Unit, noise_scale
from async_rl.method.proof.logprob_gaps import MIXED, LogprobGaps
from async_rl.method.types import Group, RolloutFacts, WeightSpan
from async_rl.rollouts.agents.turn_tree import TurnContext, TurnTree
from tests.support.groups import random_group
from tests.support.tiers import at_night
from trainer.batching.group_codec import pack_groups, unpack_groups
from trainer.logprob_gaps import MAX_GAP, sums_of
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]


def with_scores(trainer: MegatronTrainer, groups: Sequence[Group]) -> list[Group]:
    """The groups as an engine with the trainer's present weights would have sampled them."""
    scored = []
    for group in groups:
        logprobs = trainer.score(group.prompt.token_ids, [response.token_ids for response in group.responses])
        pairs = zip(group.responses, logprobs, strict=True)
        scored.append(replace(group, responses=tuple(replace(r, logprobs=tuple(lp)) for r, lp in pairs)))
    return scored


def gaps_of(trainer: MegatronTrainer, groups: Sequence[Group]) -> LogprobGaps:
    rows = [row for group in groups for row in trainer.accumulate([[group]])]
    trainer.discard()
    return LogprobGaps.total(row.all_gaps for row in rows)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 6])
def test_the_sums_are_those_of_every_token_by_instance(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, rng: random.Random, micro_batch_tokens: int
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), micro_batch_tokens=micro_batch_tokens)
    (group,) = with_scores(trainer, [random_group(3, 5, (7, 1, 4, 6), rng)])
    shifts = [[rng.gauss(0, 0.5) for _ in response.token_ids] for response in group.responses]
    names = ("http://a", "http://b", "http://a", "http://a")
    responses = [
        replace(r, instance=name, logprobs=tuple(lp - d for lp, d in zip(r.logprobs, ds, strict=True)))
        for r, ds, name in zip(group.responses, shifts, names, strict=True)
    ]
    responses[3] = replace(responses[3], num_continued=1)
    (row,) = trainer.accumulate([[replace(group, responses=tuple(responses))]])
    clip = NoiseLimits(noise_scale("float32")).clip
    expected = {"http://a": shifts[0] + shifts[2], "http://b": shifts[1], MIXED: shifts[3]}
    assert {instance for instance, _ in row.gaps} == set(expected)
    for instance, gaps in row.gaps:
        ds = expected[instance]
        assert gaps.count == len(ds) and gaps.num_bad == 0
        close = {"rel": 1e-4, "abs": 1e-5}  # the trainer's scores are float32, and not bit for bit those of before
        assert gaps.mean == pytest.approx(sum(ds) / len(ds), **close)
        assert gaps.mean_abs == pytest.approx(sum(map(abs, ds)) / len(ds), **close)
        assert gaps.rms == pytest.approx(math.sqrt(sum(d * d for d in ds) / len(ds)), **close)
        assert gaps.largest == pytest.approx(max(map(abs, ds)), **close)
        assert gaps.k1 == pytest.approx(-sum(ds) / len(ds), **close)
        assert gaps.k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in ds) / len(ds), **close)
        cut = [max(-clip, min(clip, d)) for d in ds]
        assert gaps.clipped_mean == pytest.approx(sum(cut) / len(ds), **close)
        assert gaps.clipped_rms == pytest.approx(math.sqrt(sum(d * d for d in cut) / len(ds)), **close)
    assert row.all_gaps.count == 18
    assert GroupProof.from_json(json.loads(json.dumps(asdict(row)))) == row


def test_turns_of_one_rollout_are_counted_for_the_instances_that_sampled_them(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, rng: random.Random
) -> None:
    trainer = make_trainer(tiny_model("qwen3"))
    (plain,) = with_scores(trainer, [random_group(0, 5, (16,), rng)])
    prompt, (whole,) = plain.prompt.token_ids, plain.responses
    turns = [(0, 3, "http://a", 0), (5, 9, "http://b", 0), (9, 10, "http://b", 1), (12, 16, "http://a", 0)]
    recorder = TurnTree(None)  # type: ignore[arg-type]
    expected: dict[str, list[float]] = {}
    for begin, end, instance, num_continued in turns:
        shifts = [rng.gauss(0, 0.5) for _ in range(begin, end)]
        expected.setdefault(MIXED if num_continued else instance, []).extend(shifts)
        sampled = replace(
            whole,
            token_ids=whole.token_ids[begin:end],
            logprobs=tuple(lp - d for lp, d in zip(whole.logprobs[begin:end], shifts, strict=True)),
            weight_spans=(WeightSpan("v0", 0, end - begin),),
            instance=instance,
            num_continued=num_continued,
        )
        recorder.add(TurnContext((*prompt, *whole.token_ids[:begin])), sampled)
    responses = recorder.responses(prompt)
    facts = RolloutFacts(num_turns=len(turns))
    group = replace(plain, responses=responses, rewards=(1.0,), rollouts=(facts,))
    (row,) = trainer.accumulate([unpack_groups(*pack_groups([group]))])
    assert [instance for instance, _ in row.gaps] == sorted(expected)
    for instance, gaps in row.gaps:
        shifts = expected[instance]
        assert gaps.count == len(shifts) and gaps.mean == pytest.approx(sum(shifts) / len(shifts), abs=1e-5)


@pytest.mark.usefixtures("rng")
def test_quantiles_and_totals_are_those_of_all_tokens() -> None:
    gaps = torch.randn(5000, dtype=torch.float64) ** 3
    whole, parts = sums_of(gaps, 1.0), LogprobGaps.total(sums_of(part, 1.0) for part in gaps.split(311))
    for share in (0.5, 0.9, 0.99):
        exact = float(gaps.abs().quantile(share))
        assert exact * 0.99 <= parts.quantile(share) <= exact * 1.1
    assert parts.bins == whole.bins and parts.largest == whole.largest
    assert parts.figures() == pytest.approx(whole.figures())
    assert LogprobGaps.total([]).figures() == LogprobGaps().figures()


@pytest.mark.parametrize(
    "gaps", [[float("nan")], [float("inf"), float("-inf"), 0.0], [900.0, -900.0], [0.0], [], [1e300, -1e300]]
)
def test_extreme_gaps_are_counted_and_spoil_no_sum(gaps: list[float]) -> None:
    sums = sums_of(torch.tensor(gaps, dtype=torch.float64), 1.0)
    assert sums.count + sums.num_bad == len(gaps)
    assert sums.num_bad == sum(not abs(gap) < MAX_GAP for gap in gaps)
    assert all(math.isfinite(value) for value in sums.figures().values())


def test_sound_float32_scores_are_far_below_the_limit(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, rng: random.Random
) -> None:
    trainer = make_trainer(tiny_model("qwen3"))
    groups = with_scores(trainer, [random_group(i, 9, (20, 30), rng) for i in range(8)])
    assert gaps_of(trainer, groups).rms < noise_scale("float32") / 20


@pytest.mark.parametrize(
    ("learning_rate", "steps", "is_found"),
    [(1e-6, 1, False), (1e-6, 10, True), (1e-3, 1, True), at_night(1e-3, 10, True)],
)
def test_weights_of_some_steps_ago_are_found_in_float32_as_far_as_documented(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    rng: random.Random,
    learning_rate: float,
    steps: int,
    is_found: bool,
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), learning_rate=learning_rate)
    groups = with_scores(trainer, [random_group(i, 9, (20, 30), rng) for i in range(8)])
    for _ in range(steps):
        for group in groups:
            trainer.accumulate([[group]])
        trainer.optimizer_step()
    gaps = gaps_of(trainer, groups)
    limits = NoiseLimits(noise_scale("float32"))
    print(f"{steps} steps at {learning_rate}: {gaps.figures()}, limit {limits.largest_rms(gaps.count)}")
    assert gaps.rms > 3 * noise_scale("float32") / 20, "it differs from a sound engine, judged or not"
    assert bool(limits.excesses("the batch", gaps)) == is_found


def test_an_instance_one_small_step_behind_its_peers_is_named_in_float32(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, rng: random.Random
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), learning_rate=1e-6)
    batch = [random_group(i, 9, (20, 30), rng) for i in range(32)]
    stale = with_scores(trainer, batch[:8])
    for group in batch:
        trainer.accumulate([[group]])
    trainer.optimizer_step()
    units = []
    for i, group in enumerate([*stale, *with_scores(trainer, batch[8:])]):
        (row,) = trainer.accumulate([[group]])
        units.append(Unit(f"http://{i // 8}", row.all_gaps))
    (found,) = NoiseLimits(noise_scale("float32")).outliers(units)
    assert found.startswith("instance http://0 deviates from its peers"), found


def test_in_bfloat16_one_small_step_is_not_told_from_rounding_and_large_ones_are(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, rng: random.Random
) -> None:
    limits, rms = NoiseLimits(noise_scale("bfloat16")), {}
    for learning_rate in (1e-6, 1e-2):
        trainer = make_trainer(tiny_model("qwen3"), dtype="bfloat16", learning_rate=learning_rate)
        groups = with_scores(trainer, [random_group(i, 9, (20, 30), rng) for i in range(8)])
        for group in groups:
            trainer.accumulate([[group]])
        trainer.optimizer_step()
        gaps = gaps_of(trainer, groups)
        rms[learning_rate] = gaps.rms
        print(learning_rate, gaps.figures())
        assert bool(limits.excesses("the batch", gaps)) == (learning_rate == 1e-2)
    assert rms[1e-6] < limits.noise
