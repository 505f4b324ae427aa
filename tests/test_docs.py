"""What the docs name is there."""

import re
from pathlib import Path

import pytest

from async_rl.config.keys import find_key
from async_rl.config.sections import Config
from tests.support import ROOT

DOCS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "recipes").glob("*.md"),
    ]
)
DOCS = [path for path in DOCS if path.name != "CHANGELOG.md"]  # it names files of earlier versions
FOLDERS = ("async_rl", "inference_service", "trainer", "deploy", "benchmarks", "tests", "examples", "recipes")
FILES = (".py", ".toml", ".jsonl", ".json")
NO_KEYS = {
    # Of verl, whose sections have the same names.
    *("algorithm.gamma", "algorithm.lam", "algorithm.rollout_correction"),
    *("critic.cliprange_value", "critic.model.path", "critic.optim.lr"),
    *("trainer.critic_warmup", "trainer.default_local_dir", "trainer.nnodes", "trainer.resume_mode"),
    *("trainer.save_freq", "trainer.test_freq", "trainer.total_training_steps", "trainer.v1.trainer_mode"),
    "rollout.top_p",  # refused, with the reason
    "trainer.optimizer_step",  # a method
}


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_a_document_names_exist(doc: Path) -> None:
    text = doc.read_text()
    named = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", text))
    missing = {name for name in named if not (ROOT / name).exists()}
    links = {link for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text) if not (doc.parent / link).exists()}
    assert not missing | links


def test_every_module_that_the_architecture_names_is_in_the_tree() -> None:
    files = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert named and not [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]


def test_each_term_of_the_glossary_stands_in_the_file_that_it_names() -> None:
    rows = re.findall(r"^\| ([\w ,-]+) \| .* \| `([\w/.]+)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(rows) > 40
    for term, file in rows:
        words = re.split(r"[ ,-]+", term)
        text = (ROOT / file).read_text().lower() + file
        assert all(word.rstrip("s") in text for word in words), f"{file} does not speak of {term!r}"


def test_every_key_of_the_config_that_a_document_names_is_one() -> None:
    sections = "|".join(Config.model_fields)
    for doc in DOCS:
        text = re.sub(r"^```.*?^```$", "", doc.read_text(), flags=re.M | re.S)
        named = re.findall(rf"`(?:--)?((?:{sections})(?:\.\w+)+)(?: [^`]*)?`", text)
        unknown = {key for key in named if find_key(Config, key) is None and not key.endswith(FILES)} - NO_KEYS
        assert not unknown, f"{doc.name} names {sorted(unknown)}, which are no keys of the config"
