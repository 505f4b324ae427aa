"""Several sources as one: names, shares, held-out prompts and the curriculum, on every rank and at every start."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.data import require_evaluation_sets, require_prompts
from async_rl.config.file import parse_config
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.evaluation.sets import load_sets
from async_rl.method.types import Batch, part_of
from async_rl.rollouts.data.prompts import PromptSource, conversation_of
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import text_responses
from tests.support.minimal_config import minimal_tree
from tests.support.word_tokenizer import word_tokenizer

HARD = {"prompt": "ask", "difficulty": "level", "answer": "say"}


@pytest.fixture
def parts(tmp_path: Path) -> list[dict[str, Any]]:
    """Of 90 and of 30 rows; ten of the second are also in the first, and five of it are there twice."""
    first = [{"prompt": f"{i}", "answer": i, "difficulty": (i * 31) % 7} for i in range(90)]
    second = [{"ask": f"{80 + i % 25}", "say": i, "level": 30 - i} for i in range(30)]
    for name, rows in (("first", first), ("second", second)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        {
            "name": "first",
            "source": str(tmp_path / "first.jsonl"),
            "weight": 3,
            "columns": {"difficulty": "difficulty"},
        },
        {
            "name": "second",
            "source": str(tmp_path / "second.jsonl"),
            "columns": HARD,
            "system_prompt": "7",
            "stop": ["x"],
            "max_response_tokens": 9,
        },
    ]


def section(parts: list[dict[str, Any]], **prompts: Any) -> PromptsSection:
    return PromptsSection.model_validate({"mixture": parts, "prompts_per_batch": 8} | prompts)


def load(config: PromptsSection, seed: int = 0) -> PromptSource:
    return PromptSource.load(config, word_tokenizer(), seed)


def ids(source: PromptSource, t: int) -> list[str]:
    return [prompt.prompt_id for prompt in source.batch(t).prompts.values()]


def test_each_part_has_its_share_of_every_batch_in_places_that_change(parts: list[dict[str, Any]]) -> None:
    source = load(section(parts))
    places = set()
    for t in range(30):
        names = [prompt_id.split("/")[0] for prompt_id in ids(source, t)]
        assert Counter(names) == {"first": 6, "second": 2}
        places.add(tuple(names))
    assert len(places) > 10, "the same places would be the same replicas"
    # An epoch of each part has each of its rows once.
    line = [prompt_id for t in range(15) for prompt_id in ids(source, t)]
    assert Counter(line) == {f"first/{i}": 1 for i in range(90)} | {f"second/{i}": 1 for i in range(30)}


def test_a_row_carries_its_part_and_what_the_part_says(parts: list[dict[str, Any]]) -> None:
    config = section(parts, system_prompt="5")
    prompts = {p.prompt_id: p for t in range(15) for p in load(config).batch(t).prompts.values()}
    first, second = prompts["first/3"], prompts["second/4"]
    assert (first.row["source"], second.row["source"]) == ("first", "second")
    assert (first.stop, first.max_response_tokens) == ((), None)
    assert (second.stop, second.max_response_tokens, second.row["answer"]) == (("x",), 9, 4)
    assert [m["content"] for m in conversation_of(first.row, config) or ()] == ["5", "3"]
    assert [m["content"] for m in conversation_of(second.row, config) or ()] == ["7", "84"]


@pytest.mark.parametrize(
    "prompts",
    [
        {},
        {"deduplicate": True, "chat_template": False},
        {"held_out": 0.3},
        {"held_out": 7, "curriculum_iterations": 6},
        {"curriculum_iterations": 40},
    ],
)
def test_other_ranks_and_later_starts_have_the_same_batches(
    parts: list[dict[str, Any]], prompts: dict[str, Any]
) -> None:
    if not prompts.get("chat_template", True):
        parts[1].pop("system_prompt")
    config = section(parts, **prompts)
    source = load(config, seed=3)
    outlines = json.loads(json.dumps([asdict(each) for each in source.outlines]))
    by_name = PromptSource.by_outlines(outlines, config, seed=3)
    again = load(config, seed=3)
    for t in (17, 3, 0, 50):
        assert ids(source, t) == ids(by_name, t) == ids(again, t)
        assert source.batch(t).prompts == again.batch(t).prompts
    assert again.digests == source.digests
    assert ids(load(config, seed=4), 0) != ids(source, 0)


@pytest.mark.parametrize("prompts", [{}, {"held_out": 7}, {"deduplicate": True}, {"curriculum_iterations": 6}], ids=str)
@pytest.mark.parametrize("is_mixture", [True, False])
def test_a_batch_and_its_reserve_are_drawn_like_a_larger_batch(
    parts: list[dict[str, Any]], prompts: dict[str, Any], is_mixture: bool
) -> None:
    if not is_mixture:
        first = {key: parts[0][key] for key in ("source", "columns")}
        prompts = prompts | first | {"mixture": []}
    whole = load(section(parts, **prompts))
    source = load(section(parts, prompts_per_batch=5, reserve=3, **prompts))
    # Several epochs, whose ends are amid batches.
    for t in range(40):
        batch = source.batch(t)
        assert (batch.num_trained, batch.has_reserve, len(batch.prompts)) == (5, True, 8)
        assert batch.prompts == whole.batch(t).prompts
        shares = [batch.share(rank, 3) for rank in range(3)]
        assert [share.num_trained for share in shares] == [2, 2, 1]
        assert Batch.union(shares) == batch


@pytest.mark.parametrize(
    ("reserve", "message"),
    [
        (118, r"120 rows, fewer than prompts.prompts_per_batch = 8 and prompts.reserve = 118: give more rows"),
        (100, None),
    ],
)
def test_a_reserve_needs_rows(parts: list[dict[str, Any]], reserve: int, message: str | None) -> None:
    config = section(parts, reserve=reserve)
    if message is None:
        require_prompts(config)
        return
    with pytest.raises(ConfigError, match=message):
        require_prompts(config)
    with pytest.raises(ConfigError, match=r"prompts_per_batch = 8 and prompts.reserve = 118"):
        load(config)


def test_the_curriculum_goes_from_easy_to_hard(parts: list[dict[str, Any]]) -> None:
    source = load(section(parts, curriculum_iterations=10))
    level = {p.prompt_id: p.row["difficulty"] for t in range(15) for p in source.batch(t).prompts.values()}
    for name, (least, most) in {"first": (0, 6), "second": (1, 30)}.items():
        line = [
            level[i] for t in range(10) for i in sorted(ids(source, t), key=level.__getitem__) if i.startswith(name)
        ]
        assert line == sorted(line) and least <= line[0] and line[-1] <= most
    plain = load(section(parts))
    assert sorted(i for t in range(10) for i in ids(plain, t)) == sorted(i for t in range(10) for i in ids(source, t))
    assert [ids(plain, t) for t in range(10, 20)] == [ids(source, t) for t in range(10, 20)]


def test_held_out_prompts_are_a_set_for_evaluation(parts: list[dict[str, Any]]) -> None:
    tree = minimal_tree()
    tree["prompts"] = {"mixture": parts, "prompts_per_batch": 8, "held_out": 11}
    tree["evaluation"] = {"sets": [{"name": "mine", "source": "held-out"}]}
    config = parse_config(tree, "here")
    require_prompts(config.prompts)
    require_evaluation_sets(config)
    source = load(config.prompts)
    trained = {p.token_ids for t in range(40) for p in source.batch(t).prompts.values()}
    for held_out in (source.held_out, None):
        (loaded,) = load_sets(config.evaluation, config.prompts, word_tokenizer(), 0, held_out)
        assert len(loaded.prompts) == 11 and not {p.token_ids for p in loaded.prompts} & trained
    del tree["prompts"]["held_out"]
    with pytest.raises(ConfigError, match=r"set 'mine' has the source held-out, but prompts.held_out is not"):
        require_evaluation_sets(parse_config(tree, "here"))


def test_a_part_smaller_than_its_share_is_refused(parts: list[dict[str, Any]]) -> None:
    parts[1]["weight"] = 300
    with pytest.raises(ConfigError, match=r"30 prompts of prompts.mixture 'second' are left, but its weight 300"):
        load(section(parts, prompts_per_batch=60))


@pytest.mark.distributed
def test_a_part_chooses_its_reward(parts: list[dict[str, Any]], tmp_path: Path) -> None:
    parts[0]["reward"], parts[1]["reward"] = "exact", ["format", "exact"]
    cache = tmp_path / "cache"
    pattern = {"name": "regex", "label": "format", "options": {"pattern": "5.*"}, "weight": 0.5}
    rewards = {"parts": [{"name": "exact"}, pattern]}
    reward = make_reward(RewardSection.model_validate(rewards))
    source = PromptSource.load(section(parts), word_tokenizer(), 0, cache)
    loop = EventLoopThread()
    try:
        loop.run(reward.start())
        for prompt in source.batch(0).prompts.values():
            labels = ["exact"] if prompt.prompt_id.startswith("first/") else ["exact", "format"]
            scores = loop.run(reward.score(prompt, text_responses("5")))
            assert [label for label, _ in scores.parts] == labels
    finally:
        loop.run(reward.close())
        loop.close()
    # Another choice needs no other table.
    parts[1]["reward"] = []
    names = sorted(path.name for path in cache.iterdir())
    batch = PromptSource.load(section(parts), word_tokenizer(), 0, cache).batch(0)
    assert {(part_of(each.prompt_id), each.reward) for each in batch.prompts.values()} == {
        ("first", ("exact",)),
        ("second", ()),
    }
    assert sorted(path.name for path in cache.iterdir()) == names


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (
            {"parts": [{"name": "exact"}]},
            r"mixture 'first' has the reward 'math': expected one or several of exact",
        ),
        (
            {"name": "math"},
            r"the reward 'math': .* \[\[reward.parts\]\], of which there are none",
        ),
    ],
)
def test_a_reward_that_is_not_there_is_refused(parts: list[dict[str, Any]], reward: dict[str, Any], fault: str) -> None:
    parts[0]["reward"] = "math"
    tree = minimal_tree() | {"prompts": {"mixture": parts, "prompts_per_batch": 4}, "reward": reward}
    with pytest.raises(ConfigError, match=fault):
        parse_config(tree, "x.toml")
