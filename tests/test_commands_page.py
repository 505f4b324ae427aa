"""docs/commands.md says what the commands say of themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.cli import PROGRAMS
from tests.support import ROOT
from tests.support.commands_page import PAGE

pytestmark = pytest.mark.distributed


def test_the_page_of_commands_is_what_their_help_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.support.commands_page", tmp_path / "page.md"], cwd=ROOT, check=True)
    page = (tmp_path / "page.md").read_text()
    assert PAGE.read_text() == page, "write it again: python -m tests.support.commands_page"
    assert all(f"\n## async-rl {command}\n" in page for command in PROGRAMS)
    assert "\n### async-rl fleet drain\n" in page and "\n### async-rl launch slurm\n" in page
