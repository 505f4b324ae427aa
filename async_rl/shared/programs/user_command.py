"""A user's program, named `command:PROGRAM ARGUMENTS` in a setting; for rollouts and the pre-flight."""

import shlex
import shutil
from pathlib import Path

from async_rl.errors import ConfigError

COMMAND = "command:"


def split_command(setting: str, name: str) -> list[str]:
    """The words of `command:PROGRAM ARGUMENTS`, the value of `setting`.

    Raises:
        ConfigError: there is no such program on this host, or it cannot be executed.
    """
    try:
        words = shlex.split(name.removeprefix(COMMAND))
    except ValueError as error:
        raise ConfigError(f"{setting} {name!r} cannot be split into words: {error}") from error
    program = words[0] if words else ""
    if Path(program).is_file() and shutil.which(program) is None:
        raise ConfigError(
            f"{setting} {name!r}: {program!r} is a file that must not be executed: make it executable (chmod +x), or "
            f"name the interpreter before it: {COMMAND}python {shlex.quote(program)}"
        )
    if shutil.which(program) is None:
        raise ConfigError(
            f"{setting} {name!r}: there is no program {program!r} here; write {COMMAND}PROGRAM ARGUMENTS, without a "
            f"shell's operators, or start a shell: {COMMAND}sh -c '...'"
        )
    return words
