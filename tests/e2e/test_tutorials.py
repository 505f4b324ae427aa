"""The tutorials' files and commands work as written, page after page: they are taken from the pages and run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.chat_tokenizer import make_chat_model

pytestmark = pytest.mark.distributed

PAGES = [(ROOT / "docs" / f"tutorial_{page}.md").read_text() for page in ("reward", "data", "environment")]
FILES = [("python", 0, "reward.py"), ("json", 1, "rows.jsonl"), ("python", 2, "environment.py")]


def block(language: str, page: int) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_three_pages_lead_to_a_run_that_is_proven(tmp_path: Path) -> None:
    make_chat_model(tmp_path / "model")
    for language, page, name in FILES:
        (tmp_path / name).write_text(block(language, page))
    # Its parts are shown in the pages: tests/examples/test_documents.py.
    (tmp_path / "run.toml").write_text((ROOT / "examples" / "tutorial" / "run.toml").read_text())
    said = [run_in(tmp_path, block("sh", page)) for page in range(3)]
    assert said[0].strip() == re.findall(r"It prints `(.*)`\.", PAGES[0])[0]
    assert "nproc-per-node" in said[1], "the trainer's command; a complaint would have ended it with 2"
    assert "2 of 2 iterations" in said[2], "what status says"
    proof = json.loads(said[2].splitlines()[-1])
    assert proof["on_policy"] and (proof["num_responses"], proof["num_branches"]) == (8, 0)
    assert 8 < proof["num_turns"] <= 16, "wrong first attempts were answered"
    run_dir = tmp_path / "runs" / "tutorial"
    assert len((run_dir / "ledger.jsonl").read_text().splitlines()) == 2
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert all("What is" in json.dumps(sample) for sample in samples) and samples


def run_in(folder: Path, commands: str) -> str:
    """What a block of commands prints, in an environment whose programs are ours."""
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
