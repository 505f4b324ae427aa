"""`async-rl plan --graph` on the command line: every algorithm, as text and as a picture; and mistakes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from async_rl.config.algorithm_traits import TRAITS
from deploy.scaling.__main__ import main
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
    assert names[0] == "prompts" and names[-1] == "policy" and "advantage" in names
    picture = tmp_path / "graph.svg"
    assert main([*words, "-o", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    titles = [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert titles == names and len(list(root.iter(f"{SVG}rect"))) == len(names)


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
