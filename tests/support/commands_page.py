"""Writes docs/commands.md from the help of every command: `python -m tests.support.commands_page`.

tests/test_commands_page.py fails while the page says something else than the commands do.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

from async_rl.cli import PROGRAMS
from async_rl.programs.command_line import KEYS_TITLE
from tests.support import ROOT

PAGE = ROOT / "docs" / "commands.md"

HEADER = """# Commands

What each command says of itself: `async-rl COMMAND --help`. This page is written from it by
`python -m tests.support.commands_page`. Exit codes are in [troubleshooting.md](troubleshooting.md#exit-codes).

Where a command takes `--section.key VALUE`, each key of [configuration.md](configuration.md) is an option.

```
{usage}
```
"""

WIDTH = "100"
"""Columns of the help texts."""


def commands_page() -> str:
    """The page as it should be: the usage, then every command and its subcommands, in their order in the usage."""
    sections = [HEADER.format(usage=help_of().rstrip())]
    sections += [section for command in PROGRAMS for section in _sections(command)]
    return "\n".join(sections)


def help_of(*words: str) -> str:
    """What `async-rl WORDS --help` prints."""
    return subprocess.run(
        [sys.executable, "-m", "async_rl.cli", *words, "--help"],
        env={**os.environ, "COLUMNS": WIDTH, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def _sections(*words: str) -> Iterator[str]:
    text, _, _ = help_of(*words).partition(f"\n{KEYS_TITLE}:")
    yield f"{'#' * (1 + len(words))} async-rl {' '.join(words)}\n\n```\n{text.rstrip()}\n```\n"
    if "\noptions:" not in text:
        for name in re.findall(r"^  (\w+) {2,}", text, flags=re.MULTILINE):
            yield from _sections(*words, name)


if __name__ == "__main__":
    PAGE.write_text(commands_page())
