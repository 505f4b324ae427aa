"""What the documents show is what the examples hold: a reader may copy either."""

import re

import pytest

from tests.support import ROOT


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


SHOWN_WHOLE = [
    ("docs/getting_started.md", "json", "first_run/rows.jsonl"),
    ("docs/getting_started.md", "python", "first_run/reward.py"),
    ("docs/getting_started.md", "toml", "first_run/run.toml"),
    ("docs/rewards.md", "python", "rewards/exact.py"),
    ("docs/algorithms.md", "python", "algorithm/my_algorithm.py"),
    ("docs/audit.md", "python", "audit/trl_callback.py"),
    ("docs/data.md", "python", "mixture/programs.py"),
    ("docs/gateway.md", "python", "agent/my_agent.py"),
    ("docs/migration_trl.md", "python", "python/trl_grpo.py"),
    ("docs/python.md", "python", "python/train.py"),
    ("docs/rollouts.md", "python", "tools/environment.py"),
    ("docs/sandbox.md", "python", "sandbox/isolated.py"),
    ("docs/tutorial_data.md", "json", "tutorial/rows.jsonl"),
    ("docs/tutorial_environment.md", "python", "tutorial/environment.py"),
    ("docs/tutorial_reward.md", "python", "tutorial/reward.py"),
]
SHOWN_IN_PART = [
    ("docs/algorithms.md", "toml", "algorithm/run.toml"),
    ("docs/data.md", "toml", "mixture/run.toml"),
    ("docs/evaluation.md", "toml", "evaluation/run.toml"),
    ("docs/gateway.md", "toml", "agent/run.toml"),
    ("docs/pipeline.md", "toml", "pipeline/run.toml"),
    ("docs/rewards.md", "toml", "rewards/run.toml"),
    ("docs/rollouts.md", "toml", "tools/run.toml"),
    ("docs/tutorial_data.md", "toml", "tutorial/run.toml"),
    ("docs/tutorial_environment.md", "toml", "tutorial/run.toml"),
    ("docs/tutorial_reward.md", "toml", "tutorial/run.toml"),
    ("docs/vllm.md", "toml", "vllm/run.toml"),
]


@pytest.mark.parametrize(("document", "language", "example"), SHOWN_WHOLE)
def test_a_document_shows_the_examples_file(document: str, language: str, example: str) -> None:
    assert blocks(document, language) == [(ROOT / "examples" / example).read_text()]
    assert f"examples/{example.split('/')[0]}" in (ROOT / document).read_text(), "and says where it lies"


@pytest.mark.parametrize(("document", "language", "example"), SHOWN_IN_PART)
def test_a_document_shows_a_part_of_the_examples_file(document: str, language: str, example: str) -> None:
    (block,) = blocks(document, language)
    assert block in (ROOT / "examples" / example).read_text()
    assert f"examples/{example.split('/')[0]}" in (ROOT / document).read_text(), "and says where it lies"


def test_no_other_file_to_copy_is_shown_in_a_document() -> None:
    """A new one belongs into examples/, and into the lists above."""
    documents = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    shown = {
        (document, language)
        for document in documents
        for language in ("json", "python", "toml")
        if blocks(document, language)
    }
    assert shown == {(document, language) for document, language, _ in (*SHOWN_WHOLE, *SHOWN_IN_PART)}
