"""The README's files and commands work as written: they are taken from its text and run."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def shell_blocks(first_word: str) -> list[str]:
    return [block for block in blocks("sh") if block.split()[0] == first_word]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    """A directory with the files that the README shows, and a small model called `model`."""
    shutil.copytree(tiny_model("qwen3", tied=True), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(blocks("json")[0])
    (tmp_path / "reward.py").write_text(blocks("python")[0])
    (tmp_path / "run.toml").write_text(blocks("toml")[0])
    return tmp_path


@pytest.mark.distributed
@pytest.mark.parametrize("block", shell_blocks("async-rl"))
def test_a_block_of_commands_trains_to_the_end(workplace: Path, block: str) -> None:
    port = str(free_port())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(free_port()),
    }
    script = subprocess.Popen(
        ["bash", "-euc", block.replace("8001", port)],
        cwd=workplace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # A background instance keeps the pipe open, so wait for the script itself.
        code = script.wait(150)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a block without background processes has left none
            os.killpg(script.pid, signal.SIGTERM)
    assert script.stdout is not None
    assert code == 0, script.stdout.read()
    assert len((workplace / "runs" / "mine" / "ledger.jsonl").read_text().splitlines()) == 2


def test_every_make_target_of_the_readme_exists() -> None:
    named = set(re.findall(r"^make ([a-z-]+)", "".join(blocks("sh")), flags=re.MULTILINE))
    assert named and named <= MAKE_TARGETS, named - MAKE_TARGETS


def test_every_shell_block_is_run_by_a_test_or_by_ci() -> None:
    assert {block.split()[0] for block in blocks("sh")} <= {"async-rl", "make"}


def test_every_link_into_the_repository_leads_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
