"""What the docs name is there."""

import re
from pathlib import Path

import pytest

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
