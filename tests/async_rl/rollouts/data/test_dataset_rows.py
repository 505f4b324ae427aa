"""Sources of Hugging Face `datasets`: what it saved, and what stands in its place without it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.prompts import PromptSource
from tests.support.word_tokenizer import word_tokenizer


def load(source: str, **prompts: Any) -> PromptSource:
    config = PromptsSection(**({"source": source, "prompts_per_batch": 4} | prompts))
    return PromptSource.load(config, word_tokenizer(), 0)


@pytest.mark.parametrize("source", ["hf:openai/gsm8k:main:test", "saved"])
def test_without_the_library_the_extra_is_named(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = source if source != "saved" else str(tmp_path)
    with pytest.raises(ConfigError, match=r"needs datasets: install async-rl\[datasets\]"):
        load(source)


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def test_a_saved_dataset_gives_its_rows(tmp_path: Path, datasets: Any) -> None:
    rows = [{"question": f"{i}", "answer": f"#### {i}", "tags": [{"n": i}]} for i in range(100)]
    saved = datasets.Dataset.from_list(rows).shuffle(seed=1)
    saved.save_to_disk(tmp_path / "saved")
    source = load(str(tmp_path / "saved"))
    prompts = {p.prompt_id: p for t in range(25) for p in source.batch(t).prompts.values()}
    assert len(prompts) == 100
    for number, row in enumerate(saved):
        assert prompts[str(number)].row["tags"] == row["tags"]
        assert prompts[str(number)].row["answer"] == row["question"]


def test_a_dataset_of_several_splits_and_another_directory_are_refused(tmp_path: Path, datasets: Any) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "1"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"has the splits \['train', 'test'\]: name one .*both/train'"):
        load(str(tmp_path / "both"))
    load(str(tmp_path / "both" / "train"), prompts_per_batch=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="not one that `save_to_disk` of datasets wrote"):
        load(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:a/b:train[:100]", ("a/b", None, "train[:100]")),
        ("hf:a/b:main:test[10:20]", ("a/b", "main", "test[10:20]")),
        ("hf:a/b:main:test", ("a/b", "main", "test")),
    ],
)
def test_a_split_may_be_a_slice(
    datasets: Any, monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str | None, ...]
) -> None:
    asked: list[tuple[str | None, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"prompt": "1"}] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load(source)
    assert asked == [expected]


def test_a_hub_name_that_is_none_is_refused(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'hf:a/b:c:d:e': expected hf:OWNER/NAME\[:CONFIG\]\[:SPLIT\]"):
        load("hf:a/b:c:d:e")
    with pytest.raises(ConfigError, match=r"'hf:a/no-such:test' cannot be fetched from the hub"):
        load("hf:a/no-such:test")
