"""Hook of mkdocs (mkdocs.yml): links that leave docs/ become the path that they name, since the site has only docs/.

On a code host the same links lead to the file. tests/test_docs.py checks that each of them leads somewhere.
"""

import posixpath
import re
from typing import Any

LINK_OUT = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, **_page: Any) -> str:
    """The text of a page as the site shows it."""
    return LINK_OUT.sub(lambda link: _as_text(link[1], link[2]), markdown)


def _as_text(label: str, target: str) -> str:
    path = posixpath.normpath(posixpath.join("docs", target.partition("#")[0]))
    return label if path in label else f"{label} (`{path}`)"
