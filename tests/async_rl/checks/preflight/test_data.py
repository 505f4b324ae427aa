"""Whether prompts and evaluation sets can be read, as far as their first rows tell."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.data import NUM_ROWS, require_evaluation_sets, require_prompts
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support.minimal_config import config_of


def config_with(folder: Path, num_rows: int, *, bad_row: int | None = None, **prompts: Any) -> Config:
    lines = [json.dumps({"prompt": f"p{i}"} if i != bad_row else {"prompt": 1}) for i in range(num_rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return config_of(prompts={"source": str(folder / "rows.jsonl"), "chat_template": False, **prompts})


@pytest.mark.parametrize(
    ("num_rows", "num_needed"), [(4, 4), (3, 4), (1, 1), (NUM_ROWS + 5, NUM_ROWS + 5), (2000, 2001)]
)
def test_there_have_to_be_rows_for_one_batch_to_the_row(tmp_path: Path, num_rows: int, num_needed: int) -> None:
    config = config_with(tmp_path, num_rows, prompts_per_batch=num_needed)
    if num_rows >= num_needed:
        require_prompts(config.prompts)
        return
    with pytest.raises(ConfigError, match=f"has {num_rows} rows, fewer than prompts.prompts_per_batch = {num_needed}"):
        require_prompts(config.prompts)


@pytest.mark.parametrize(("bad_row", "is_seen"), [(0, True), (NUM_ROWS - 1, True), (NUM_ROWS, False)])
def test_so_many_rows_are_looked_at(tmp_path: Path, bad_row: int, is_seen: bool) -> None:
    config = config_with(tmp_path, NUM_ROWS + 10, bad_row=bad_row)
    if not is_seen:
        require_prompts(config.prompts)
        return
    with pytest.raises(ConfigError, match=f"row {bad_row}: column 'prompt' is int"):
        require_prompts(config.prompts)


@pytest.mark.parametrize(("max_prompts", "is_seen"), [(None, True), (6, True), (5, False)])
def test_a_set_is_looked_at_as_far_as_it_is_used(tmp_path: Path, max_prompts: int | None, is_seen: bool) -> None:
    config = config_with(tmp_path, 8, bad_row=5)
    sets = [{"name": "held-out", "source": config.prompts.source, "max_prompts": max_prompts}]
    changed = parse_config(config.model_dump(mode="json") | {"evaluation": {"sets": sets}}, "here")
    if not is_seen:
        require_evaluation_sets(changed)
        return
    with pytest.raises(ConfigError, match=r"evaluation set 'held-out': .*row 5: column 'prompt' is int"):
        require_evaluation_sets(changed)


@pytest.mark.parametrize(("weight", "is_enough"), [(1.0, True), (3.0, False)])
def test_each_part_of_a_mixture_has_rows_for_its_share(tmp_path: Path, weight: float, is_enough: bool) -> None:
    config = config_with(tmp_path, 50)
    (tmp_path / "few.jsonl").write_text(json.dumps({"prompt": "p"}) + "\n")
    mixture = [
        {"name": "many", "source": config.prompts.source, "weight": 7.0},
        {"name": "few", "source": str(tmp_path / "few.jsonl"), "weight": weight},
    ]
    changed = config_with(tmp_path, 50, source=None, mixture=mixture, prompts_per_batch=8)
    if is_enough:
        require_prompts(changed.prompts)
        return
    with pytest.raises(ConfigError, match=r"prompts\.mixture 'few' has 1 rows, but its weight 3 gives it 3 of"):
        require_prompts(changed.prompts)


@pytest.mark.parametrize(
    ("num_rows", "held_out", "is_enough"), [(10, 6, True), (10, 7, False), (10, 99, False), (10, 0.9, True)]
)
def test_held_out_rows_leave_enough_for_a_batch(
    tmp_path: Path, num_rows: int, held_out: float, is_enough: bool
) -> None:
    config = config_with(tmp_path, num_rows, held_out=held_out)
    if is_enough:
        require_prompts(config.prompts)
        return
    with pytest.raises(ConfigError, match=rf"held_out is {held_out}, which leaves {max(10 - int(held_out), 0)} of 10"):
        require_prompts(config.prompts)


def test_of_a_source_with_more_rows_than_are_looked_at_nothing_is_said_about_those_held_out(tmp_path: Path) -> None:
    require_prompts(config_with(tmp_path, NUM_ROWS + 5, held_out=NUM_ROWS).prompts)
