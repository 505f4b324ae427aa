"""The chart library that the package ships is the release that the documentation names."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

from async_rl.parts.dashboard.page import MODULES, STATIC
from async_rl.parts.dashboard.record_table import DETAILS, NO_CURVES
from tests.support import ROOT

# SHA-256 of dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE in the npm package uplot 1.6.32.
UPLOT_1_6_32 = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_uplot_is_the_unchanged_release_that_the_documentation_names() -> None:
    folder = files("async_rl.parts.dashboard").joinpath("static", "uplot")
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    assert found == UPLOT_1_6_32
    assert "uPlot 1.6.32" in (ROOT / "docs" / "watching.md").read_text()


def test_every_metric_that_all_records_have_has_a_title_on_the_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().split("## In every record")[1].split("\n## ")[0]
    names = set(re.findall(r"^\| `(\w+)` \|", page, re.M)) - {*NO_CURVES, *DETAILS, "weight_version", "on_policy"}
    script = files("async_rl.parts.dashboard").joinpath("static", "metric_names.js").read_text()
    assert len(names) > 40 and {*names, "merged_share"} <= set(re.findall(r"^  (\w+): \[", script, re.M))


def test_every_file_of_the_page_is_served_and_each_module_after_those_it_imports() -> None:
    folder = Path(str(files("async_rl.parts.dashboard").joinpath("static")))
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert present == {*STATIC, "uplot/LICENSE"}
    for place, name in enumerate(MODULES):
        imported = re.findall(r'from "\./(\w+\.js)"', (folder / name).read_text())
        assert set(imported) <= set(MODULES[:place])
