"""docs/configuration.md says what the settings say of themselves, and each setting has a user."""

import re
import tomllib
from pathlib import Path

from async_rl.config.keys import keys_of
from async_rl.config.sections import Config
from tests.support import ROOT
from tests.support.configuration_page import GROUPS, PAGE, configuration_page, names_of

SHIPPED = sorted(path for folder in ("recipes", "examples", "deploy") for path in (ROOT / folder).rglob("*.toml"))
PAGES = [path for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md") if path != PAGE]


def test_the_page_of_settings_is_what_the_code_says() -> None:
    assert PAGE.read_text() == configuration_page(), "write it again: python -m tests.support.configuration_page"


def test_a_setting_is_in_one_group_and_each_of_a_group_exists() -> None:
    grouped = [name for group in GROUPS.values() for name in names_of(group)]
    assert len(set(grouped)) == len(grouped) and set(grouped) <= keys_of(Config).keys()


def keys_in(path: Path) -> set[str]:
    """The keys, with their sections, that a TOML file sets."""
    tree = tomllib.loads(path.read_text())
    return {f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) for key in keys}


def test_each_setting_is_in_a_shipped_config_or_a_page_says_when_to_set_it() -> None:
    """One without a user is a named constant, beside the code that reads it.

    A page may name a key without its section in code, where no other section has one of that name.
    """
    text = "\n".join(page.read_text() for page in PAGES)
    used = set[str]().union(*map(keys_in, SHIPPED)) | set(re.findall(r"(?<![\w.])[a-z]+\.\w+", text))
    in_code = {word for code in re.findall(r"`[^`\n]+`|^\w+ = ", text, flags=re.M) for word in re.findall(r"\w+", code)}
    short = [name.partition(".")[2] for name in keys_of(Config)]
    used |= {name for name in keys_of(Config) if (key := name.partition(".")[2]) in in_code and short.count(key) == 1}
    unused = sorted(keys_of(Config).keys() - used)
    assert not unused, f"set these in a recipe or an example, or say on a page when somebody would: {unused}"


def test_there_are_no_more_settings_than_somebody_can_know() -> None:
    """A new one takes the place of one that few need."""
    assert len(keys_of(Config)) <= 111, "make it a named constant, or an option of one kind of reward or algorithm"
