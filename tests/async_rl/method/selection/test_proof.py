"""The ledger of batches with a reserve: right selections pass and are recorded, each way to be wrong is named."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from async_rl.errors import OnPolicyViolation
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits, noise_scale
from async_rl.method.proof.prompt_ids import digest_of_ids
from async_rl.method.selection.rule import Selection
from async_rl.method.types import Batch, Prompt, Publication
from trainer.logprob_gaps import sums_of

LIMITS = NoiseLimits(noise_scale("float32"))
PUBLICATION = Publication(version="run-7", fingerprint="abc", instances=("http://a",), num_bytes=1, seconds=0.1)
EQUAL, DIFFER = (1.0, 1.0), (0.0, 1.0)


def row(index: int, rewards: Sequence[float] = DIFFER) -> GroupProof:
    return GroupProof(
        index=index,
        prompt_id=f"row-{index}",
        num_responses=2,
        num_prompt_tokens=2,
        num_response_tokens=5,
        versions=("run-7",),
        rewards=tuple(rewards),
        attempts=1,
        gaps=(("http://a", sums_of(torch.full((5,), 1e-6, dtype=torch.float64), LIMITS.clip)),),
    )


def left_out(index: int, rewards: Sequence[float] = EQUAL) -> GroupProof:
    return replace(row(index, rewards), is_trained=False, gaps=())


def batch_of(num_trained: int, reserve: int) -> Batch:
    prompts = {i: Prompt(f"row-{i}", (1, 2), {}) for i in range(num_trained + reserve)}
    return Batch(7, prompts, num_trained)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl", responses_per_prompt=2, limits=LIMITS)


def last_record(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    return found


def test_a_selection_is_proven_and_recorded(ledger: Ledger, tmp_path: Path) -> None:
    rows = [row(4), left_out(1), row(0), row(2), left_out(3)]
    ledger.require_on_policy(batch_of(3, 4), PUBLICATION, rows)
    record = last_record(tmp_path)
    assert record["on_policy"] is True
    assert (record["num_groups"], record["num_responses"], record["num_response_tokens"]) == (3, 6, 15)
    assert record["prompt_ids"] == ["row-0", "row-2", "row-4"]
    assert record["selection"] == {
        "num_drawn": 7,
        "num_replicas": 1,
        "trained": ["0", "2", "4"],
        "left_out": ["1", "3"],
        "num_left_out": 2,
        "num_without_signal": 0,
        "drawn_ids_sha256": digest_of_ids(f"row-{i}" for i in range(7)),
    }


def test_groups_without_a_signal_fill_the_quota_once_all_are_known(ledger: Ledger, tmp_path: Path) -> None:
    rows = [row(0, EQUAL), left_out(1), row(2), left_out(3), left_out(4)]
    ledger.require_on_policy(batch_of(2, 3), PUBLICATION, rows)
    selection = last_record(tmp_path)["selection"]
    assert isinstance(selection, dict) and selection["num_without_signal"] == 1


def test_a_batch_without_a_reserve_has_no_selection(ledger: Ledger, tmp_path: Path) -> None:
    ledger.require_on_policy(batch_of(2, 0), PUBLICATION, [row(0), row(1, EQUAL)])
    assert "selection" not in last_record(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0), row(1), row(3)], r"group 2 \(prompt 'row-2'\) was neither trained nor left out"),
        ([row(0), left_out(1), row(2)], "group 3 .* was neither trained nor left out"),
        ([row(0), row(1), left_out(2), left_out(3), left_out(4)], "group 5 .* was neither"),
        ([row(0), left_out(1, DIFFER), row(2), row(3)], "group 1 .*rewards differ.* left out, but .* select 0-2"),
        ([row(0), row(1, EQUAL), row(2), row(3)], "group 1 .*are all equal.* was trained, but .* select 0, 2-3"),
        ([row(0), row(1, EQUAL), row(2), left_out(3, DIFFER)], "group 3 .*rewards differ.* left out, but"),
        ([row(0), row(1), row(2), left_out(3)], "group 3 .* left out, but the selection was complete without it: 0-2"),
        ([row(0), row(1), row(2), row(3)], "group 3 .* was trained, but"),
        ([row(0), row(0), row(1), row(2)], r"group 0 \(prompt 'row-0'\) has 2 rows, expected 1"),
        ([row(0), row(1), row(2), left_out(2)], "group 2 .* has 2 rows"),
        ([row(0), row(1), row(2), row(9)], "group 9 .* is not part of the batch of 6 prompts"),
        ([row(0), row(1), replace(row(2), prompt_id="row-5")], "stands in for prompt 'row-2'"),
        ([row(0), row(1), replace(row(2), gaps=())], "5 response tokens, but log-probs of 0 were compared"),
        ([row(0), replace(left_out(1), versions=("run-6",)), row(2), row(3)], r"group 1 .*\['run-6'\]"),
        ([row(0), replace(left_out(1), num_responses=1), row(2), row(3)], "group 1 .* has 1 responses, expected 2"),
        (
            [*(row(i, EQUAL) for i in (0, 2)), row(3), *map(left_out, (1, 4, 5))],
            "group 1 .*are all equal.* left out, but .* select 0-1, 3",
        ),
    ],
)
def test_a_wrong_selection_is_named_and_recorded(
    ledger: Ledger, tmp_path: Path, rows: list[GroupProof], message: str
) -> None:
    with pytest.raises(OnPolicyViolation, match=message):
        ledger.require_on_policy(batch_of(3, 3), PUBLICATION, rows)
    assert last_record(tmp_path)["on_policy"] is False


def test_of_random_batches_exactly_the_right_rows_pass() -> None:
    """Each leader's own selection passes; with one row missing, added, or trained instead of left out, none does."""
    ledger = Ledger(None, responses_per_prompt=2, limits=LIMITS)
    for seed in range(300):
        rng = Random(seed)
        size = rng.randint(1, 3)
        batch = batch_of(size * rng.randint(1, 3), rng.randint(1, 6))
        rewards = {index: rng.choice((EQUAL, DIFFER)) for index in batch.prompts}
        rows: list[GroupProof] = []
        for rank in range(size):
            share = batch.share(rank, size)
            selection = Selection(share)
            for index in share.prompts:
                selection.add_group(index, rewards[index])
            rows += [row(index, rewards[index]) for index in selection.in_order()]
            if share.has_reserve:
                rows += [left_out(index, rewards[index]) for index in selection.left_out()]
        rng.shuffle(rows)
        ledger.require_on_policy(batch, PUBLICATION, rows, size)

        changed = rng.randrange(len(rows))
        before = rows[changed]
        other = left_out(before.index, before.rewards) if before.is_trained else row(before.index, before.rewards)
        unneeded = sorted(batch.prompts.keys() - {each.index for each in rows})
        more = [make(index, rewards[index]) for index in unneeded for make in (row, left_out)]
        wrong = [[*rows[:changed], *rows[changed + 1 :]], [*rows[:changed], other, *rows[changed + 1 :]]]
        for each in [*wrong, *([*rows, added] for added in more)]:
            with pytest.raises(OnPolicyViolation):
                ledger.require_on_policy(batch, PUBLICATION, each, size)
