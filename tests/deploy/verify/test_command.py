"""What the command refuses before it starts anything, what it overrides, and how it shows findings."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.config.file import load_config
from async_rl.errors import ConfigError, RunDirInUse
from async_rl.records.findings import fails, holds, not_tested, show, write_report
from async_rl.shared.locks.run_lock import LOCK_FILE
from deploy.verify.__main__ import MARK, common_overrides, main, take_directory
from deploy.verify.verification import Scope
from tests.support.local_run import Run

FINDINGS = [
    holds("weights", "equal after 3 iterations", "equal bit for bit"),
    fails("log-probs", "reports [0.7]", "RMS 0.1", "http://a", "wrong temperature"),
    not_tested("one instance lost", "left out with --quick"),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, tmp_path / "no-model")


def test_a_folder_is_emptied_only_if_a_verification_made_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    take_directory(out, Path("run.toml")).close()
    assert json.loads((out / MARK).read_text()) == {"config": "run.toml", "holds": False, "findings": []}
    (out / "periodic").mkdir()
    (out / "link").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(out)
    with take_directory(tmp_path / "other", Path("run.toml")), pytest.raises(RunDirInUse):
        take_directory(out, Path("run.toml"))
    assert {path.name for path in out.iterdir()} == {MARK, LOCK_FILE} and tmp_path.exists()
    (out / MARK).unlink()
    (out / "precious").touch()
    with pytest.raises(ConfigError, match="no verification made"):
        take_directory(out, Path("run.toml"))
    with pytest.raises(ConfigError, match="is a file"):
        take_directory(out / "precious", Path("run.toml"))
    with pytest.raises(ConfigError, match="cannot be made"):
        take_directory(out / "precious" / "below", Path("run.toml"))
    assert (out / "precious").exists()


def test_every_stage_is_short_repeatable_and_free_of_what_is_beside_training(run: Run, tmp_path: Path) -> None:
    words = (
        "--publish.canary=off",
        "--algorithm.name=ppo",
        "--algorithm.options.critic_iterations_alone=50",
        "--train.iterations=99",
    )
    config = load_config(run.config, words)
    as_run = load_config(run.config, common_overrides(config, words, tmp_path, 3, 2))
    assert (as_run.train.iterations, as_run.train.order, as_run.checkpoint.every) == (3, "prompt", 0)
    assert as_run.algorithm.critic.critic_iterations_alone == 2
    assert as_run.inference.num_instances == 2
    assert as_run.publish.canary == "first" and not as_run.evaluation.sets
    of_one = load_config(run.config, common_overrides(config, words, tmp_path, 1, 1))
    assert of_one.algorithm.critic.critic_iterations_alone == 0
    words = ("--train.iterations=null", "--train.epochs=2")
    of_epochs = load_config(run.config, common_overrides(load_config(run.config, words), words, tmp_path, 3, 2))
    assert of_epochs.train.iterations == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iterations", "0"], "--iterations is 0"),
        (["--iterations", "many"], "invalid int"),
        (["--trian.iterations", "3"], "trian"),
        (["--pool.instances", '["http://127.0.0.1:1"]'], "pool.instances"),
        ([], "no-model"),
        (["--run.dir", "."], "no-model"),
    ],
)
def test_bad_input_ends_with_code_2_before_a_folder_is_made(
    run: Run, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([str(run.config), *words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not run.dir.with_name("run-verify").exists()


def test_the_records_of_an_earlier_verification_are_no_obstacle(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.dir.with_name("run-verify")
    (out / "periodic").mkdir(parents=True)
    (out / "periodic" / "metrics.jsonl").write_text("{}\n")
    assert main([str(run.config)]) == 2
    said = capsys.readouterr().err
    assert "no-model" in said and "holds the records" not in said
    assert (out / "periodic").exists(), "nothing is removed for a config that is not usable"


def test_findings_are_lines_without_a_terminal_and_a_table_in_one() -> None:
    plain, terminal = Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True, width=200)
    for console in (plain, terminal):
        show(console, FINDINGS, "async-rl verify")
    lines = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "weights: holds: equal after 3 iterations (bound: equal bit for bit)"
    assert lines[1] == "log-probs of http://a: fails, wrong temperature: reports [0.7] (bound: RMS 0.1)"
    assert lines[-1] == "1 holds, 1 fails, 1 not tested"
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "┃" in shown and "reports [0.7]" in shown


def test_the_report_has_every_finding_and_the_verdict(tmp_path: Path) -> None:
    write_report(tmp_path / MARK, {"iterations": 3}, FINDINGS)
    report = json.loads((tmp_path / MARK).read_text())
    assert report["iterations"] == 3 and report["holds"] is False
    assert report["findings"][1]["cause"] == "wrong temperature"


def test_a_range_of_instances_leaves_room_for_the_spare_one_and_no_tracker_hears_of_the_stages(
    run: Run, tmp_path: Path
) -> None:
    words = ("--cluster.max_instances=1", '--tracking.trackers=["wandb"]')
    config = load_config(run.config, words)
    as_run = load_config(run.config, common_overrides(config, words, tmp_path, 3, 2))
    assert (as_run.cluster.max_instances, as_run.tracking.trackers) == (2, ())


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["--algorithm.name=python:own.py:Own", "--train.mode=synchronous"], "synchronous"),
        (["--algorithm.name=python:own.py:Own"], "periodic"),
        (["--algorithm.name=reinforce_pp_baseline", "--train.mode=synchronous"], "synchronous"),
        (["--train.mode=synchronous"], "periodic"),
    ],
)
def test_an_algorithm_that_may_wait_for_batches_is_not_made_periodic(run: Run, words: list[str], mode: str) -> None:
    assert Scope(load_config(run.config, words), 3, False, 2).mode == mode
