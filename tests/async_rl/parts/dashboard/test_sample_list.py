import io
import json
from pathlib import Path

import pytest

from async_rl.parts.dashboard.sample_list import main
from tests.support.synthetic_run import SyntheticRun


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = SyntheticRun(tmp_path_factory.mktemp("runs") / "run", num_iterations=5)
    run.write()
    return run.run_dir


def rewards(capsys: pytest.CaptureFixture[str]) -> list[float]:
    return [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]


def test_the_worst_and_the_best_are_those_of_the_lowest_and_the_highest_reward(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir), "--worst", "7", "--json"]) == 0
    assert rewards(capsys) == [-0.5] * 5 + [0.0] * 2
    assert main([str(run_dir), "--best", "3", "--json", "--iteration", "2"]) == 0
    assert rewards(capsys) == [1.0] * 3


def test_without_options_the_newest_are_shown_and_a_pattern_chooses_among_all(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "What is 4 + 2?" in out and "What is 2 + 0?" not in out
    assert main([str(run_dir), "--grep", r"what is 0 \+ 1", "--json"]) == 0
    assert [json.loads(line)["iteration"] for line in capsys.readouterr().out.splitlines()] == [0, 0]
    assert main([str(run_dir), "--grep", "nowhere"]) == 0
    assert "no recorded sample" in capsys.readouterr().err


def test_a_response_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[31mred\x07 [bold]not markup[/bold]\r\ud800"
    row = {"iteration": 0, "index": 0, "prompt": "\x1b]0;title\x07", "responses": [{"text": text, "reward": None}]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert not set("\x1b\x07\r") & set(out)
    assert "[bold]not markup[/bold]" in out and "no reward" in out
    assert main([str(tmp_path), "--worst", "3", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_tabs_spaces_and_joiners_of_a_response_are_kept_and_bidirectional_controls_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = "def f():\n\treturn 1\n\u3000\u6f22\xa0\u0645\u06cc\u200c\u062e"
    row = {"iteration": 0, "index": 0, "prompt": "a\r\nb", "responses": [{"text": kept + "\u202e\u2066\u200b"}]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a\nb\n" in out and kept.replace("\t", " " * 8) + "\ufffd\ufffd\ufffd\n" in out


def test_a_terminal_without_unicode_shows_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"iteration": 0, "index": 0, "prompt": "\u6f22", "responses": [{"text": "caf\xe9 \ud83d\ude00"}]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", ascii_file)
    assert main([str(tmp_path)]) == 0
    ascii_file.flush()
    assert b"?\ncaf? " in ascii_file.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--worst", "0"], "a number of samples, 1 to"),
        (["--newest", str(10**20)], "a number of samples, 1 to"),
        (["--worst", "1", "--best", "1"], "exclude each other"),
        (["--grep", "("], "is not a regular expression"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    run_dir: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir), *options]) == 2
    assert reason in capsys.readouterr().err
