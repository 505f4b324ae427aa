"""The text of a config: each key below its description, from the config's own models, and the reason of its value."""

import textwrap
from collections.abc import Sequence

from async_rl.config.keys import keys_of
from async_rl.config.sections import Config
from async_rl.config.toml_text import toml_value
from async_rl.shared.programs.error_text import one_line
from deploy.init.choose import Choice

WIDTH = 110

HEADER = """# A first run, written by async-rl init from what model, data and machine show.
# Every other key has its default: docs/configuration.md, or async-rl run --help. What this run would be and need:
#     async-rl check {name}
"""


def config_text(choices: Sequence[Choice], name: str) -> str:
    """A TOML file, to be called `name`, with these settings in the order of the config's sections."""
    keys = keys_of(Config)
    by_name = {choice.name: choice for choice in choices}
    lines = [HEADER.format(name=name)]
    section = None
    for key in keys.values():
        if (choice := by_name.get(key.name)) is None:
            continue
        if key.section != section:
            section = key.section
            lines.append(f"\n[{section}]" if lines[1:] else f"[{section}]")
        lines += _comment(key.description)
        reason = f"  # {choice.reason}" if choice.reason else ""
        lines.append(f"{key.name.partition('.')[2]} = {toml_value(choice.value)}{one_line(reason)}")
    return "\n".join(lines) + "\n"


def _comment(description: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(description, WIDTH)]
