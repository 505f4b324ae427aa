"""Writes docs/commands.md from the help of every command: `python -m tests.support.commands_page`.

tests/test_commands_page.py fails while the page says something else than the commands do; it names another file.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from async_rl.cli import PROGRAMS, USAGE
from async_rl.shared.programs.command_line import KEYS_TITLE
from tests.support import ROOT

PAGE = ROOT / "docs" / "commands.md"

HEADER = """# Commands

What each command says with `--help`, an option of all, from which `python -m tests.support.commands_page` writes this
page. Exit codes are in [troubleshooting.md](troubleshooting.md#exit-codes). Where a command takes `--section.key
VALUE`, each key of [configuration.md](configuration.md) is an option.

```
{usage}
```
"""

WIDTH = "100"
"""Columns of the help texts."""


def commands_page() -> str:
    """The page as it should be: the usage, then every command and its subcommands, in their order in the usage."""
    sections = [HEADER.format(usage=USAGE)]
    sections += [section for command in PROGRAMS for section in _sections(command)]
    return "\n".join(sections)


def help_of(command: str, *words: str) -> str:
    """What `async-rl COMMAND WORDS --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            _run(sys.executable, ["", "-m", PROGRAMS[command][0], *words, "--help"])
        except SystemExit as end:
            assert not end.code, (command, words, end.code)
    return printed.getvalue()


def _run(python: str, command: list[str]) -> None:
    """`python -m MODULE ARGUMENTS` in this process."""
    _, _, module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _sections(*words: str) -> Iterator[str]:
    text, _, _ = help_of(*words).partition(f"\n{KEYS_TITLE}:")
    shown = re.sub(r"^  -h, --help .*\n", "", text, flags=re.MULTILINE)
    shown = re.sub(r"\noptions:\s*\Z", "", shown)
    yield f"{'#' * (1 + len(words))} async-rl {' '.join(words)}\n\n```\n{shown.rstrip()}\n```\n"
    if "\noptions:" not in text:
        for name in re.findall(r"^  (\w+) {2,}", text, flags=re.MULTILINE):
            yield from _sections(*words, name)


if __name__ == "__main__":
    os.environ["COLUMNS"] = WIDTH
    # A command that another one replaces itself by, too.
    os.execv = _run  # type: ignore[assignment]
    path = Path(sys.argv[1]) if sys.argv[1:] else PAGE
    path.write_text(commands_page())
