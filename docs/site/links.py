"""Hook of mkdocs (mkdocs.yml): what a reader of the site sees instead of links that are made for a code host.

Links that leave docs/ become the path that they name, since the site has only docs/; tests/test_docs.py checks that
each of them leads somewhere. Links whose label is the name of a page get its title in the navigation.
"""

import posixpath
import re
from typing import Any

from mkdocs.structure.files import Files

LINK_OUT = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)")
LINK_BY_NAME = re.compile(r"\[([\w/]+\.md)\](\(([\w/]+\.md)(?:#[\w-]*)?\))")


def on_page_markdown(markdown: str, files: Files, **_others: Any) -> str:
    """The text of a page as the site shows it."""
    text = LINK_OUT.sub(lambda link: _as_text(link[1], link[2]), markdown)
    return LINK_BY_NAME.sub(lambda link: f"[{_title(link[3], files) or link[1]}]{link[2]}", text)


def _as_text(label: str, target: str) -> str:
    path = posixpath.normpath(posixpath.join("docs", target.partition("#")[0]))
    return label if path in label else f"{label} (`{path}`)"


def _title(path: str, files: Files) -> str | None:
    file = files.get_file_from_path(path)
    return str(file.page.title) if file and file.page and file.page.title else None
