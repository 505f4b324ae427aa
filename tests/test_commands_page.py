"""docs/commands.md says what the commands say of themselves."""

import pytest

from async_rl.cli import PROGRAMS
from tests.support.commands_page import PAGE, commands_page

pytestmark = pytest.mark.distributed


def test_the_page_of_commands_is_what_their_help_says() -> None:
    page = commands_page()
    assert PAGE.read_text() == page, "write it again: python -m tests.support.commands_page"
    assert all(f"\n## async-rl {command}\n" in page for command in PROGRAMS)
    assert "\n### async-rl fleet drain\n" in page and "\n### async-rl launch slurm\n" in page
