"""Configs of earlier releases give the prompts of these releases, in their order: recorded with 0.1's code."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.data.prompts import PromptSource
from tests.support.word_tokenizer import word_tokenizer

PLAIN = """
15 25 31 5 24 33 22 | 20 39 40 3 38 10 30 | 11 12 16 32 29 19 7 | 13 37 28 6 2 21 1 | 34 14 23 4 14 29 21
16 39 34 19 24 1 5 | 7 6 38 25 32 22 3 | 15 40 33 2 20 28 23
"""
CHAT = """
18 35 34 27 7 | 14 36 40 37 8 | 1 3 30 22 2 | 13 24 25 4 26 | 32 19 9 6 17
20 38 31 10 12 | 11 15 23 28 5 | 29 39 16 0 33 | 21 33 13 10 15
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": " ".join(str((i * 7 + k) % 97) for k in range(i % 9)), "answer": i} for i in range(41)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def batches(source: PromptSource, num: int) -> list[list[str]]:
    return [[prompt.prompt_id for prompt in source.batch(t).prompts.values()] for t in range(num)]


def recorded(text: str) -> list[list[str]]:
    return [batch.split() for line in text.strip().splitlines() for batch in line.split("|")]


def load(seed: int, **prompts: Any) -> PromptSource:
    return PromptSource.load(PromptsSection(**prompts), word_tokenizer(), seed)


def test_plain_text_with_long_and_empty_prompts(rows: Path) -> None:
    source = load(11, source=str(rows), prompts_per_batch=7, max_prompt_tokens=7, chat_template=False)
    assert batches(source, 8) == recorded(PLAIN) and len(source) == 32
    # A checkpoint of then has these, and resumes.
    assert dict(list(source.digests.items())[:3]) == {
        "1 to 1": "15d1fd62642f5765",
        "2 to 2": "7597bc1e5dc26f6f",
        "3 to 3": "b34e9b1002a4d81f",
    }


def test_chat(rows: Path) -> None:
    source = load(2, source=str(rows), prompts_per_batch=5, system_prompt="1 2")
    assert batches(source, 9) == recorded(CHAT)
    assert source.batch(0).prompts[0].token_ids == (2000, 2000, 1, 2, 2000, 2000)
    assert dict(list(source.digests.items())[:2]) == {"0 to 0": "f0fb7e5acf0a2853", "1 to 1": "f4a29d1a95a4bf64"}


def test_a_task() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"prompts_per_batch": 3, "chat_template": False, "task_options": {"size": 9}}
    source = load(5, source="reasoning-gym:spell_backward", **options)
    assert batches(source, 4) == [["3", "8", "2"], ["4", "0", "5"], ["7", "1", "6"], ["6", "3", "0"]]
    answers = [prompt.row["answer"] for prompt in source.batch(0).prompts.values()]
    assert answers == ["cibupona", "wonkerof", "tuobnrut"]
