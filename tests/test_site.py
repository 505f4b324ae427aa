"""The documentation as a site: `make docs` builds it, and a reader's browser asks no other host for anything."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.make_target import make

pytestmark = pytest.mark.distributed

LOADED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=["']?(?:\w+:)?//[^>]*>""")
IMPORTED = re.compile(r"""@import\s+["'(]|url\(["']?(?:https?:)?//""")


@pytest.mark.nightly
def test_the_site_has_every_page_and_asks_no_other_host(tmp_path: Path) -> None:
    make("docs", f"--site-dir {tmp_path}")
    pages = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= set(pages)
    assert not list(tmp_path.rglob("*.py")), "the hook is no part of it"
    # Each recipe and example has a page, which others link to.
    recipes, examples = ROOT / "recipes", ROOT / "examples"
    shown = [f"recipes/{path.stem}" for path in recipes.glob("*.toml")]
    shown += [f"examples/{path.parent.name}" for path in examples.glob("*/run.toml")]
    assert len(shown) > 20 and not [name for name in shown if f'href="{name}.html"' not in pages["index"]]
    assert "responses_per_prompt" in (tmp_path / "recipes" / "gsm8k_gpu.html").read_text()
    assert "my_agent.py" in (tmp_path / "examples" / "agent.html").read_text()
    assert 'href="../benchmarks.html' in (tmp_path / "recipes" / "index.html").read_text()
    assert 'href="examples/algorithm.html"><code>examples/algorithm</code></a>' in pages["algorithms"]
    assert not [(name, found[0]) for name, text in pages.items() for found in LOADED.finditer(text)]
    assert not [sheet.name for sheet in tmp_path.rglob("*.css") if IMPORTED.search(sheet.read_text())]
    # On the site a link that leaves docs/ is the path of the file.
    assert "unless told otherwise (SECURITY.md)." in pages["troubleshooting"]
    assert not [name for name, text in pages.items() if 'href="../' in text]
    # A label that is a file's name is the title of the page.
    assert not [name for name, text in pages.items() if re.search(r">\w+\.md</a>", text)]


@pytest.mark.nightly
def test_a_link_or_an_anchor_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in ("docs", "recipes", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with (tmp_path / "docs" / "troubleshooting.md").open("a") as page:
        page.write("[a page](nowhere.md) and [a place](period.md#nowhere)")
    with pytest.raises(AssertionError, match=r"(?s)2 warnings.*link 'nowhere\.md'.*'period\.md#nowhere'"):
        make("docs", f"--config-file {tmp_path}/mkdocs.yml --site-dir {tmp_path}/site")
