"""`async-rl plan --graph` on the command line: every algorithm, as text and as a picture; and mistakes."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from async_rl.config.algorithm_traits import TRAITS
from deploy.scaling.__main__ import main
from tests.support import ROOT
from tests.support.minimal_config import MINIMAL

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("name", TRAITS)
def test_each_algorithm_is_shown(name: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--graph", str(config), f"--algorithm.name={name}", "--train.mode=synchronous", "--rollout.stop=[1]"]
    words += ["--algorithm.teacher=t"] if name == "distillation" else []
    words += ["--trainer.micro_batch_tokens=1000000"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines[1:]]
    assert names[0] == "prompts" and names[-1] == "policy"
    assert ("advantage" in names) == (name != "distillation")
    picture = tmp_path / "graph.svg"
    assert main([*words, "-o", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    titles = [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert titles == names and len(list(root.iter(f"{SVG}rect"))) == len(names)


def numbers_in(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?[0-9.]+", text)]


def points_of(path: str) -> Iterator[tuple[float, float]]:
    """Of M, C and H: points along the curves, and the ends of the straight parts."""
    x = y = 0.0
    for letter, rest in re.findall("([MCH])([^MCH]*)", path):
        numbers = numbers_in(rest)
        if letter == "C":
            curve = [(x, y), *zip(numbers[::2], numbers[1::2], strict=True)]
            for t in (number / 20 for number in range(21)):
                factors = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
                yield tuple(sum(a * point[i] for a, point in zip(factors, curve, strict=True)) for i in (0, 1))  # type: ignore[misc]
            x, y = curve[-1]
        else:
            end_x, y = numbers[0], numbers[1] if letter == "M" else y
            yield from ((x + (end_x - x) * part / 50, y) for part in range(51 if letter == "H" else 0))
            x = end_x


def test_no_arrow_passes_a_box_and_no_name_is_wider_than_its_own(config: Path, tmp_path: Path) -> None:
    words = ["--graph", str(ROOT / "examples" / "pipeline" / "run.toml"), "--algorithm.kl_coef=0.1"]
    words.append(f'--pipeline.nodes=[{{name = "{"m" * 90}", function = "python:n.py:f", reads = ["rewards"]}}]')
    for given in (words, words[:-1]):
        assert main([*given, "-o", str(tmp_path / "graph.svg")]) == 0
        root = ElementTree.parse(tmp_path / "graph.svg").getroot()
        boxes = [
            [float(rect.get(name, "")) for name in ("x", "y", "width", "height")] for rect in root.iter(f"{SVG}rect")
        ]
        for path in root.iter(f"{SVG}path"):
            for at_x, at_y in points_of(path.get("d", "") if path.get("marker-end") else ""):
                assert not any(x < at_x < x + width and y < at_y < y + height for x, y, width, height in boxes)
        names = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
        assert all(8 * len(name) < box[2] for name, box in zip(names, boxes, strict=True))


def test_mistakes_are_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--graph", str(tmp_path / "none.toml")], "cannot read the config"),
        (["--graph", str(config), "-o", str(tmp_path)], "cannot be written"),
        (["--graph", str(config), "--algorithm.name=grpoo"], "algorithm.name is 'grpoo'"),
    ):
        assert main(words) == 2 and said in capsys.readouterr().err
    for words in ([str(tmp_path), "-o", "x.svg"], [str(tmp_path), "--algorithm.name=ppo"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and "add --graph" in capsys.readouterr().err
