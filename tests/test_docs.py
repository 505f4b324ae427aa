"""What the docs name is there."""

import re
import tomllib
from collections.abc import Iterator
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
FILES = (".py", ".toml", ".jsonl", ".json", ".safetensors")
NO_KEYS = {
    # Of Python.
    *("trainer.run", "trainer.config"),
    # Of verl, whose sections have the same names.
    *("algorithm.gamma", "algorithm.lam", "algorithm.rollout_correction"),
    *("critic.cliprange_value", "critic.model.path", "critic.optim.lr"),
    *("trainer.critic_warmup", "trainer.default_local_dir", "trainer.nnodes", "trainer.resume_mode"),
    *(
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.v1.sampler.max_off_policy_threshold",
        "trainer.v1.trainer_mode",
    ),
    "rollout.top_p",  # refused, with the reason
    "trainer.optimizer_step",  # a method
    *("run.metrics", "run.evaluations"),  # of a run in Python
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


def test_every_folder_that_the_architecture_names_is_in_the_tree() -> None:
    folders = {
        path.relative_to(ROOT).as_posix() for top in FOLDERS for path in (ROOT / top).rglob("*") if path.is_dir()
    }
    named = re.findall(r"`([\w/]+)/`", (ROOT / "docs" / "architecture.md").read_text())
    bases = ("", "async_rl/", "async_rl/parts/", "async_rl/rollouts/", "trainer/", "deploy/", "inference_service/")
    bases += ("async_rl/method/", "async_rl/shared/", "async_rl/records/", "async_rl/checks/")
    assert named and not [name for name in named if not any(f"{base}{name}" in {*FOLDERS, *folders} for base in bases)]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_empty_line_divides_a_table(doc: Path) -> None:
    """Code hosts show the rest as plain text."""
    text = re.sub(r"^```.*?^```$", "", doc.read_text(), flags=re.M | re.S)
    tables = re.findall(r"^(?:\|.*\n)+", text, flags=re.M)
    assert not [table[:80] for table in tables if not re.match(r"\|.*\n\|[-:| ]+\n", table)]


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


COMMANDS = dict(
    re.findall(
        r"^###? async-rl ([\w ]+)\n(.*?)(?=^##|\Z)", (ROOT / "docs" / "commands.md").read_text(), flags=re.M | re.S
    )
)
"""Each command, such as `fleet drain`, and its help, which tests/test_commands_page.py compares with the parsers."""


def words_of_commands(text: str) -> Iterator[list[str]]:
    """The words after `async-rl` in code of a document, without comments."""
    text = text.replace("\\\n", " ")
    fence = re.compile(r"^ *```\w*\n(.*?)^ *```$", flags=re.M | re.S)
    lines = [line for block in fence.findall(text) for line in block.splitlines()]
    for code in (*lines, *re.findall(r"`([^`]+)`", fence.sub("", text))):
        for words in re.findall(r"async-rl ([a-z]+\b(?:(?!async-rl)[^#|;&])*)", code.partition("#")[0]):
            yield words.split()


def is_known(option: str, usage: str) -> bool:
    name = option.partition("=")[0]
    if name in ("-h", "--help"):  # of every command; the page leaves it out
        return True
    if "." in name:
        return name == "--section.key" or find_key(Config, name.removeprefix("--")) is not None
    return re.search(rf"(?<![\w-]){re.escape(name)}\b", usage) is not None


SHADOWED = ("trainer", "inference_service", "deploy")
"""Installed packages with names that files of a user have, too; `benchmarks` and `tests` run in a checkout only."""


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_that_a_document_names_runs_our_module_in_every_folder(doc: Path) -> None:
    for command, module in re.findall(r"((?:python|torchrun)\b[^`\n]*?) -m ([a-z_]\w*)", doc.read_text()):
        is_shadowed = module in SHADOWED and not command.endswith(" -P")
        assert not is_shadowed, f"{command} -m {module}: a {module}.py of the working directory would run in its place"


@pytest.mark.parametrize(
    "doc", [doc for doc in DOCS if doc.name != "commands.md"], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_commands_and_options_that_a_document_names_are_there(doc: Path) -> None:
    for words in words_of_commands(doc.read_text()):
        command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        assert command in COMMANDS, f"async-rl {' '.join(words)}"
        own = words[: words.index("--")] if "--" in words else words  # what follows is vLLM's
        unknown = [word for word in own if re.match(r"--?[a-z]", word) and not is_known(word, COMMANDS[command])]
        assert not unknown, f"async-rl {' '.join(words)}"


def test_every_extra_is_in_getting_started() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = "".join(re.findall(r"^\| (`\w+`.*?) \|", (ROOT / "docs" / "getting_started.md").read_text(), flags=re.M))
    assert table and not [extra for extra in extras if extra != "dev" and f"`{extra}`" not in table]


def test_no_document_has_a_place_that_was_to_be_filled_in() -> None:
    assert not [doc.name for doc in DOCS if re.search(r"@[A-Z_]+@|TODO|TBD|XXX", doc.read_text())]
