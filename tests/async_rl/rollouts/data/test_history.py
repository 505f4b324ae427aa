"""Which prompts are passed over: against a plain walk through the epochs, on every rank and after every resume."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.method.group_proof import GroupProof
from async_rl.method.types import Batch
from async_rl.rollouts.data.history import History
from async_rl.rollouts.data.order import PartOrder
from async_rl.rollouts.data.prompts import PromptSource
from tests.support.word_tokenizer import word_tokenizer

Rewards = Callable[[str], Sequence[float]]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{name}.jsonl" for name in ("first", "second")]
    for path, numbers in zip(paths, (range(37), range(50, 61)), strict=True):
        path.write_text("".join(json.dumps({"prompt": f"{i}", "level": i % 5}) + "\n" for i in numbers))
    return list(map(str, paths))


def section(files: list[str], **prompts: Any) -> PromptsSection:
    columns = {"difficulty": "level"}
    parts = [{"name": f"p{n}", "source": file, "weight": 3 - n, "columns": columns} for n, file in enumerate(files)]
    source = {"mixture": parts} if len(files) > 1 else {"source": files[0], "columns": columns}
    return PromptsSection.model_validate({"prompts_per_batch": 6, "pass_over": 2} | source | prompts)


def load(config: PromptsSection) -> PromptSource:
    return PromptSource.load(config, word_tokenizer(), 3)


def rows_of(batch: Batch, rewards: Rewards, indices: Iterable[int] | None = None) -> list[GroupProof]:
    return [
        GroupProof(
            index=index,
            prompt_id=batch.prompts[index].prompt_id,
            num_responses=2,
            num_prompt_tokens=1,
            num_response_tokens=2,
            versions=("v",),
            rewards=tuple(rewards(batch.prompts[index].prompt_id)),
            attempts=1,
            gaps=(),
        )
        for index in (batch.prompts if indices is None else indices)
    ]


def ids(batch: Batch) -> list[str]:
    return [prompt.prompt_id for prompt in batch.prompts.values()]


def some_have_none(seed: int) -> Rewards:
    """A signal in two prompts of three, other ones at each visit."""
    visits: Counter[str] = Counter()

    def rewards(prompt_id: str) -> Sequence[float]:
        visits[prompt_id] += 1
        rng = Random(f"{seed}/{prompt_id}/{visits[prompt_id]}")
        return (0.0, 1.0) if rng.random() < 0.67 else (rng.choice((0.0, 1.0)),) * 2

    return rewards


def expected_batches(order: PartOrder, size: int, num: int, pass_over: int, rewards: Rewards) -> list[list[str]]:
    """One source, `size` prompts a batch: the definition, as a walk in which each prompt counts down on its own."""
    batches, due, places = [], Counter[str](), count()
    for _ in range(num):
        batch: list[str] = []
        while len(batch) < size:
            prompt_id = str(order.at(next(places)))
            if prompt_id in batch:
                continue
            if due[prompt_id]:
                due[prompt_id] -= 1
            else:
                batch.append(prompt_id)
        for prompt_id in batch:
            due[prompt_id] = 0 if len(set(rewards(prompt_id))) > 1 else pass_over
        batches.append(batch)
    return batches


@pytest.mark.parametrize("pass_over", [1, 2, 7])
def test_prompts_without_a_signal_are_passed_over_so_many_times(files: list[str], pass_over: int) -> None:
    source = load(section(files[:1], pass_over=pass_over, reserve=2))
    rewards, batches = some_have_none(1), []
    for t in range(60):
        batches.append(ids(batch := source.batch(t)))
        source.note(rows_of(batch, rewards))
    assert batches == expected_batches(PartOrder(3, "", 37), 8, 60, pass_over, some_have_none(1))


def test_without_a_history_the_batches_are_those_of_a_run_that_passes_nothing_over(files: list[str]) -> None:
    plain, source = load(section(files, pass_over=0)), load(section(files))
    assert plain.history is None
    for t in range(4):  # The first epoch of the smaller part.
        assert source.batch(t).prompts == plain.batch(t).prompts
        source.note(rows_of(source.batch(t), lambda _: (0.0, 1.0)))
        plain.note([])


@pytest.mark.parametrize(
    "prompts", [{}, {"reserve": 3}, {"held_out": 5, "deduplicate": True}, {"curriculum_iterations": 9}], ids=str
)
def test_other_ranks_and_resumed_runs_draw_the_same(files: list[str], prompts: dict[str, Any]) -> None:
    config = section(files, **prompts)
    leader = load(config)
    outlines = json.loads(json.dumps([asdict(each) for each in leader.outlines]))
    other = PromptSource.by_outlines(outlines, config, seed=3)
    rewards, rng, num_passed_over = some_have_none(2), Random(0), 0
    for t in range(40):
        if t % 7 == 5:
            assert leader.history is not None
            saved = json.loads(json.dumps(leader.history.as_json()))
            leader = load(config)
            assert leader.history is not None
            leader.history.restore(saved)
        batch = leader.batch(t)
        assert ids(other.batch(t)) == ids(batch) == ids(leader.batch(t)), "of what was noted alone"
        assert other.batch(t).drawn_by == batch.drawn_by
        assert len(set(ids(batch))) == len(ids(batch)), "no prompt twice"
        shares = Counter(prompt_id.partition("/")[0] for prompt_id in ids(batch))
        assert abs(shares["p0"] - len(ids(batch)) * 3 / 5) < 2, "the weights of a mixture hold"
        assert batch.drawn_by is not None
        num_passed_over += batch.drawn_by.num_passed_over
        # Of a reserve some prompts have no rewards.
        known = sorted(rng.sample(sorted(batch.prompts), config.prompts_per_batch))
        rows = rows_of(batch, rewards, known)
        leader.note(rows)
        other.note(list(reversed(rows)))
    assert num_passed_over > 20


def test_where_nothing_has_a_signal_batches_are_full_and_every_prompt_comes_again(files: list[str]) -> None:
    source = load(section(files, pass_over=3))
    seen: Counter[str] = Counter()
    for t in range(40):
        batch = source.batch(t)
        assert len(set(ids(batch))) == 6
        seen.update(ids(batch))
        source.note(rows_of(batch, lambda _: (1.0, 1.0)))
    assert len(seen) == 48 and min(seen.values()) >= 2


def test_a_part_that_is_smaller_than_its_share_of_a_batch_repeats_its_prompts() -> None:
    history, order = History([3], 1), PartOrder(0, "", 3)
    draw = history.draw([0] * 7, [order])
    assert Counter(Counter(draw.rows).values()) == {2: 2, 3: 1}


def test_the_history_of_other_prompts_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    history = History([4, 5], 2)
    digest = history.sha256
    for saved in (None, History([4], 2).as_json(), History([5, 4], 2).as_json()):
        history.restore(saved)
        assert history.sha256 == digest
    assert caplog.text.count("none of them is passed over at first") == 3


def test_the_history_of_two_million_prompts_is_small() -> None:
    history, rng = History([2_000_000], 3), Random(0)
    for _ in range(3):
        draw = history.draw([0] * 1024, [SimpleNamespace(at=lambda place: rng.randrange(2_000_000))])
        history.note(draw, dict.fromkeys(draw.rows, False))
    assert len(json.dumps(history.as_json())) < 20_000
    again = History([2_000_000], 3)
    again.restore(history.as_json())
    assert again.sha256 == history.sha256
