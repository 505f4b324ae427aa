"""The quickstart as a program: what it refuses, and that Ctrl-C leaves nothing behind."""

import io
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.config.file import load_config
from async_rl.errors import ConfigError, RunDirInUse
from async_rl.shared.locks.lease import take_lease
from async_rl.shared.locks.run_lock import lock_run
from deploy.quickstart.__main__ import (
    adapter_words,
    find_vllm_python,
    make_run_dir,
    quickstart,
    show_summary,
    vllm_words,
)
from deploy.quickstart.kind import KINDS
from tests.support.waiting import wait_for


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.quickstart", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def commands_with(text: str) -> list[str]:
    """Command lines of living processes that name `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.parametrize("task", KINDS)
def test_the_config_is_valid_and_its_paths_are_those_of_the_default_folder(task: str) -> None:
    kind = KINDS[task]
    config = load_config(kind.config)
    assert config.rollout.responses_per_prompt > 1
    assert config.run.dir == kind.run_dir
    assert config.model.path == str(kind.run_dir / "base_model")
    assert config.prompts.source == str(kind.run_dir / "data" / "prompts.jsonl")


def test_lora_sets_adapters_and_a_rate_for_them_that_can_be_set_otherwise() -> None:
    kind, words = KINDS["smollm2"], [*adapter_words("smollm2"), "--optimizer.learning_rate=1e-4"]
    full, adapted, other = (load_config(kind.config, each) for each in ((), words[:2], words))
    assert adapted.adapter.rank == 16 and adapted.adapter.targets == ("all-linear",) and not full.adapter.is_given
    assert adapted.optimizer.learning_rate == pytest.approx(20 * full.optimizer.learning_rate)
    assert other.optimizer.learning_rate == 1e-4
    with pytest.raises(ConfigError, match=r"--lora is for smollm2: the model of spelling is small enough"):
        adapter_words("spelling")


def test_a_fresh_run_dir_is_made_and_an_earlier_quickstarts_is_emptied(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "quickstart"
    make_run_dir(run_dir, seed=0)
    (run_dir / "metrics.jsonl").write_text("old")
    make_run_dir(run_dir, seed=1)
    assert [path.name for path in run_dir.iterdir()] == ["quickstart.json"]


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that no quickstart made"):
        make_run_dir(tmp_path, seed=0)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_in_which_a_run_has_not_ended_is_refused_and_kept(tmp_path: Path) -> None:
    make_run_dir(tmp_path, seed=0)
    with lock_run(tmp_path), pytest.raises(RunDirInUse, match="is in use by another run"):
        make_run_dir(tmp_path, seed=0)
    assert (tmp_path / "quickstart.json").exists()


def test_a_folder_whose_lease_is_held_is_refused_also_where_nothing_is_locked(tmp_path: Path) -> None:
    """As by a trainer on another host whose file system has no locks."""
    make_run_dir(tmp_path, seed=0)
    lease = take_lease(tmp_path, 20.0)
    with pytest.raises(RunDirInUse, match="is in use by a run on"):
        make_run_dir(tmp_path, seed=0)
    assert (tmp_path / "quickstart.json").exists()
    lease.release()
    make_run_dir(tmp_path, seed=0)


@pytest.mark.parametrize("word", ["--run.dir=elsewhere", "--run.seed=3", "--reward.name=math"])
def test_keys_that_the_quickstart_sets_itself_are_refused_before_it_starts(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{word}': the quickstart sets {word.partition('=')[0]} itself"):
        quickstart("spelling", tmp_path / "run", 0, [word], Console())
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_a_bad_override_ends_before_the_warm_start(tmp_path: Path) -> None:
    process = start("--run-dir", str(tmp_path / "run"), "--optimizer.learningrate", "1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "unknown key 'optimizer.learningrate'" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_in_the_warm_start_leaves_no_process(tmp_path: Path) -> None:
    process = start("--run-dir", str(tmp_path / "run"))
    wait_for(lambda: any("deploy.quickstart.warm_start" in command for command in commands_with(str(tmp_path))))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in output
    # A guard whose start was interrupted ends by itself.
    wait_for(lambda: not commands_with(str(tmp_path)), said=lambda: commands_with(str(tmp_path)))


def test_a_folder_that_is_a_link_is_emptied_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "quickstart"
    link.symlink_to(tmp_path / "disk")
    make_run_dir(link, seed=0)
    (link / "data").mkdir()
    (link / "data" / "rows.jsonl").touch()
    (link / "elsewhere").symlink_to(tmp_path)
    make_run_dir(link, seed=1)
    assert link.is_symlink() and [path.name for path in link.iterdir()] == ["quickstart.json"]
    assert link.exists() and (tmp_path / "disk").exists()


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "below", tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match=r"cannot be made or emptied: .*; give another folder"):
            make_run_dir(place, seed=0)


@pytest.mark.parametrize(
    ("seed", "word", "message"),
    [
        (-1, "--train.iterations=1", "run.seed"),
        (0, '--pool.instances=["dns:instances:8000"]', r"pool\.instances is \['dns:instances:8000'\]"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_the_warm_start(
    tmp_path: Path, seed: int, word: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quickstart("spelling", tmp_path / "run", seed, [word], Console())
    assert not (tmp_path / "run").exists()


def test_the_summary_shows_the_folder_as_it_is_called() -> None:
    console = Console(file=io.StringIO(), width=200)
    ends = (f"{what}_{when}" for what, when in product(("accuracy", "reward"), ("before", "after", "first", "last")))
    counts = ["seed", "iterations", "num_responses", "seconds", "tokens_per_s", "on_policy", "max_logprob_gap"]
    counts += ["merged_share", "accuracy_gain", "publish_bytes"]
    summary = {
        **dict.fromkeys((*ends, *counts), 1),
        "task": "t",
        "engine": "e",
        "phases_s": {},
        "device_split": {"cores": {}},
    }
    show_summary(console, summary, Path("runs/[/b][lr=1]"))
    assert "runs/[/b][lr=1]/model" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_python_that_is_named_is_the_one_that_has_vllm() -> None:
    assert vllm_words(["--train.iterations=2", "--inference.python=/opt/vllm/python"]) == ["--inference.engine=vllm"]


def test_the_python_beside_the_project_is_taken_where_this_one_has_no_vllm(tmp_path: Path) -> None:
    python = tmp_path / "python"
    with pytest.raises(ConfigError, match="make vllm"):
        find_vllm_python(python)
    python.touch()
    assert find_vllm_python(python) == str(python)
