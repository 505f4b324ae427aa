"""The changelog can be released from: Unreleased first, then dated versions, the newest being the package's."""

import re
from datetime import date

from async_rl import __version__
from tests.support import ROOT

HEADINGS = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_unreleased_comes_first_and_every_other_heading_is_a_version_with_its_date() -> None:
    assert HEADINGS[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in HEADINGS[1:]]
    assert releases and all(releases), HEADINGS
    in_order = [(tuple(map(int, each.groups()[:3])), date.fromisoformat(each[4])) for each in releases if each]
    assert in_order == sorted(in_order, reverse=True)


def test_the_newest_version_is_the_packages() -> None:
    assert HEADINGS[1].startswith(f"[{__version__}] ")


def test_a_kind_of_change_has_one_heading_per_version() -> None:
    for section in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert len(kinds) == len(set(kinds))
        assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
