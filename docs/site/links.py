"""Hooks of mkdocs (mkdocs.yml): what a reader of the site sees instead of what is made for a code host.

Recipes and examples become pages, one for each recipe and each folder of an example, below their README. Links to them
lead there; other links that leave docs/ become the path that they name, and tests/test_docs.py checks that each of them
leads somewhere. Links whose label is the name of a page get its title in the navigation.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SHOWN = ("recipes", "examples")
"""Folders beside docs/ that are part of the site."""

LANGUAGES = {".py": "python", ".toml": "toml", ".jsonl": "json"}
MAX_LINES = 200
"""Of a file, as it is shown: data may have more."""

LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[\w-]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages of `SHOWN` are below their README in the navigation."""
    config.nav = [_with_pages(item) for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for folder in SHOWN:
        files.append(File.generated(config, f"{folder}/README.md", content=(ROOT / folder / "README.md").read_text()))
        for uri, path in pages_of(folder):
            files.append(File.generated(config, uri, content="\n".join(_shown(path))))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_others: Any) -> str:
    """The text of a page as the site shows it."""
    uri = page.file.src_uri
    if posixpath.dirname(uri) in SHOWN and not uri.endswith("/README.md"):
        # Code has brackets of its own.
        return markdown
    return LINK.sub(lambda link: _link(link, uri, files), markdown)


def pages_of(folder: str) -> Iterator[tuple[str, Path]]:
    """The page of each recipe, or of each folder of an example, and what it shows."""
    for path in sorted((ROOT / folder).iterdir()):
        if path.suffix == ".toml" or (path / "run.toml").exists():
            yield f"{folder}/{path.stem}.md", path


def _with_pages(item: Any) -> Any:
    (title, uri), *_ = item.items() if isinstance(item, dict) else [("", item)]
    folder = posixpath.dirname(uri) if isinstance(uri, str) else ""
    if folder not in SHOWN:
        return item
    return {title: [uri, *({Path(page).stem: page} for page, _ in pages_of(folder))]}


def _shown(path: Path) -> Iterator[str]:
    yield f"# {path.stem}\n"
    if path.is_file():
        yield f"`{path.relative_to(ROOT)}`, to copy and change; [all recipes](README.md).\n"
        yield _fence(path)
        return
    yield f"The files of `{path.relative_to(ROOT)}/`, to copy; [all examples](README.md).\n"
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        yield f"## {file.name}\n\n{_fence(file)}"


def _fence(file: Path) -> str:
    lines = file.read_text().splitlines()
    more = [f"... {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []
    return "\n".join([f"````{LANGUAGES.get(file.suffix, 'text')}", *lines[:MAX_LINES], *more, "````\n"])


def _link(link: re.Match[str], uri: str, files: Files) -> str:
    label, target, anchor = link[1], link[2], link[3] or ""
    own = uri if posixpath.dirname(uri) in SHOWN else f"docs/{uri}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
    file = files.get_file_from_path(_uri_of(path))
    if file is None:
        # Of docs/ itself: mkdocs reports what leads nowhere.
        is_inside = path.startswith("docs/")
        return link[0] if is_inside else label if path in label else f"{label} (`{path}`)"
    title = file.page.title if file.page is not None and re.fullmatch(r"[\w/]+\.md", label) else None
    return f"[{title or label}]({posixpath.relpath(file.src_uri, posixpath.dirname(uri) or '.')}{anchor})"


def _uri_of(path: str) -> str:
    """The page of the site that shows a file or folder of the repository, if one does."""
    folder, _, rest = path.partition("/")
    if folder == "docs":
        return rest
    if not rest or rest == "README.md":
        return f"{folder}/README.md"
    return f"{folder}/{Path(rest.partition('/')[0]).stem}.md"
