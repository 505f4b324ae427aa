import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.evaluation_section import EvaluationSection
from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.evaluation.sets import load_sets, source_of
from async_rl.method.types import Prompt
from async_rl.rollouts.data.prompts import load_prompts


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps({"ask": f"Word {i}"}) + "\n" for i in range(5)))
    return path


def section(*sets: dict[str, Any]) -> EvaluationSection:
    return EvaluationSection.model_validate({"sets": sets})


def test_prompts_of_a_set_are_rendered_as_those_that_are_trained_on(rows: Path, tokenizer: Any) -> None:
    prompts = PromptsSection(
        source="train.jsonl", prompts_per_batch=4, columns={"prompt": "ask"}, system_prompt="Spell."
    )
    (loaded,) = load_sets(section({"name": "words", "source": str(rows), "max_prompts": 3}), prompts, tokenizer, 0)
    assert [prompt.row for prompt in loaded.prompts] == [
        dict.fromkeys(("ask", "prompt"), f"Word {i}") for i in range(3)
    ]
    text = tokenizer.decode(list(loaded.prompts[1].token_ids))
    assert text == "system: Spell.\nuser: Word 1\n"


def test_rows_of_a_task_are_not_those_that_are_trained_on(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")
    prompts = PromptsSection(
        source="reasoning-gym:spell_backward",
        prompts_per_batch=1,
        task_options={"size": 20, "min_word_len": 9, "seed": 3},
    )
    (loaded,) = load_sets(section({"name": "words", "source": prompts.source}), prompts, tokenizer, 3)
    trained = {prompt.row["question"] for prompt in load_prompts(prompts, tokenizer, 3)}
    questions = {prompt.row["question"] for prompt in loaded.prompts}
    assert len(loaded.prompts) == 20 and questions != trained
    assert all(len(prompt.row["answer"]) >= 9 for prompt in loaded.prompts)
    (again,) = load_sets(section({"name": "other", "source": prompts.source}), prompts, tokenizer, 3)
    assert [prompt.row for prompt in again.prompts] == [prompt.row for prompt in loaded.prompts]


def test_a_set_that_cannot_be_read_is_named(rows: Path, tokenizer: Any) -> None:
    prompts = PromptsSection(source="train.jsonl", prompts_per_batch=1)
    with pytest.raises(ConfigError, match=r"evaluation set 'gone': .*cannot be read"):
        load_sets(section({"name": "gone", "source": str(rows.with_name("no.jsonl"))}), prompts, tokenizer, 0)
    with pytest.raises(ConfigError, match=r"evaluation set 'words': .*no value in column 'prompt'"):
        load_sets(section({"name": "words", "source": str(rows)}), prompts, tokenizer, 0)


def test_two_sets_of_one_name_are_refused(rows: Path, tokenizer: Any) -> None:
    prompts = PromptsSection(source="train.jsonl", prompts_per_batch=1, columns={"prompt": "ask"})
    twice = section({"name": "words", "source": str(rows)}, {"name": "words", "source": str(rows)})
    with pytest.raises(ConfigError, match=r"the names \['words', 'words'\]: give each a name of its own"):
        load_sets(twice, prompts, tokenizer, 0)


@pytest.mark.parametrize(
    ("prompt_id", "row", "source"),
    [
        ("7", {}, ""),
        ("7", {"data_source": "gsm8k"}, "gsm8k"),
        ("sums/7", {"data_source": "gsm8k"}, "sums"),
        ("7", {"data_source": 3}, ""),
    ],
)
def test_a_prompt_is_of_its_part_of_a_mixture_else_of_what_its_row_names(
    prompt_id: str, row: dict[str, Any], source: str
) -> None:
    assert source_of(Prompt(prompt_id, (1,), row)) == source
