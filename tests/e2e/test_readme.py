"""The files and commands of README and first steps work as written: they are taken from the texts and run."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from async_rl.shared.net.free_ports import free_ports
from deploy.quickstart.kind import KINDS
from tests.support import ROOT
from tests.support.make_target import make

FIRST_STEPS = (ROOT / "README.md").read_text() + (ROOT / "docs" / "getting_started.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(language: str, text: str = FIRST_STEPS) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def shell_blocks(first_word: str) -> list[str]:
    return [block for block in blocks("sh") if block.split()[0] == first_word]


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    """A directory with the files that the first steps show, and a small model called `model`."""
    shutil.copytree(tiny_model("qwen3", tied=True), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(blocks("json")[0])
    (tmp_path / "reward.py").write_text(blocks("python")[0])
    (tmp_path / "run.toml").write_text(blocks("toml")[0])
    return tmp_path


def is_plain_run(block: str) -> bool:
    """Whether it is a run of other settings and nothing else: what these do is shown by runs of other tests."""
    return block.startswith("async-rl run run.toml") and len(block.splitlines()) == 1


@pytest.mark.distributed
@pytest.mark.parametrize("block", list(filter(is_plain_run, shell_blocks("async-rl"))))
def test_a_run_of_other_settings_can_be_started(workplace: Path, block: str) -> None:
    assert "-m async_rl.trainer run.toml" in run_in(workplace, f"{block.rstrip()} --dry-run")


def run_in(workplace: Path, block: str) -> str:
    """What a block of commands prints, at ports that are free."""
    master_port, *others = free_ports(4)
    for port, free in zip(("8001", "8002", "8700"), others, strict=True):
        block = block.replace(port, str(free))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(master_port),
    }
    script = subprocess.Popen(
        ["bash", "-euc", block],
        cwd=workplace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # A background instance keeps the pipe open, so wait for the script itself.
        code = script.wait(240)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a block without background processes has left none
            os.killpg(script.pid, signal.SIGTERM)
    assert script.stdout is not None
    said = script.stdout.read()
    assert code == 0, said
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("block", [block for block in shell_blocks("async-rl") if not is_plain_run(block)])
def test_a_block_of_commands_trains_to_the_end(workplace: Path, block: str) -> None:
    said = run_in(workplace, block)
    if "async-rl eval" in block:
        assert "pass@4" in said
        return
    run_dir = workplace / re.search(r"runs/\w+", block + "runs/mine")[0]
    iterations = int(re.search(r"--train.iterations (\d+)|$", block)[1] or 2)
    assert len((run_dir / "ledger.jsonl").read_text().splitlines()) == iterations
    if "--register" in block:
        instances = [json.loads(line)["num_instances"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert instances[-1] == 2, "the second one joined"
    if "async-rl export" in block:
        assert AutoModelForCausalLM.from_pretrained(workplace / "exported").config.model_type == "qwen3"


@pytest.mark.distributed
def test_make_quickstart_installs_what_its_tasks_need_and_nothing_else(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def installs(target: str) -> list[str]:
        """What a fresh checkout would install for a target."""
        command = ["make", "--dry-run", target]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        return re.findall(r'-e "\.\[([\w,]+)\]"', done.stdout)

    (extras,) = installs("quickstart")
    assert set(extras.split(",")) == {extra for kind in KINDS.values() for extra in kind.extras}
    assert installs("check") == installs("test") == [extras, "all,dev"]
    for mark in (".ready-user", ".ready"):
        (tmp_path / ".venv").mkdir(exist_ok=True)
        (tmp_path / ".venv" / mark).touch()
    assert installs("quickstart") == installs("test") == []


@pytest.mark.distributed
@pytest.mark.always
def test_make_quickstart_leaves_everything_it_promises(tmp_path: Path) -> None:
    """It runs the console script of the module that runs here, whose processes are warm."""
    run_dir = tmp_path / "run"
    arguments = f"--iterations 3 --run-dir {run_dir}"
    assert make("quickstart", arguments, "--dry-run").splitlines()[-1] == f".venv/bin/async-rl quickstart {arguments}"
    command = [sys.executable, "-m", "deploy.quickstart", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "held-out accuracy" in done.stdout, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    promised = (
        "iterations",
        "seconds",
        "accuracy_before",
        "accuracy_after",
        "reward_first",
        "reward_last",
        "on_policy",
    )
    assert {*promised, "tokens_per_s", "device_split"} <= set(summary)
    assert summary["iterations"] == 3
    assert summary["on_policy"] is True
    assert 0.2 <= summary["accuracy_before"] <= 0.45
    proofs = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert [proof["num_responses"] for proof in proofs] == [512] * 3
    report = (run_dir / "report.html").read_text()
    assert "words it never trained on" in report and 'id="embedded"' in report
    assert list((run_dir / "tensorboard").iterdir())
    assert AutoModelForCausalLM.from_pretrained(run_dir / "model").config.model_type == "qwen3"


TINY_PRODUCER = "--prompts 8 --responses 4 --tokens 64 --small-responses 160 --pairs 1 --window-s 0.2 --warm-up-s 0.2"
# Not how much overlap buys: beside other tests both pools share their cores, and it can gain nothing.
SMALL_BENCHMARKS = {
    "bench-overlap": ("--pairs 1 --prompts 12 --responses-at-once 32", {"speedup", "bound_s", "overlap_efficiency"}),
    "bench-shared-prompt": ("--repeats 1 --case 40 8 4", {"cases"}),
    "bench-weight-sync": ("--repeats 1 --size tiny", {"publish_s", "bare_s", "gb_per_s", "ratio"}),
    "bench-producer": (TINY_PRODUCER, {"responses_per_s", "cpu_s_per_1000", "peak_bytes", "main_thread_slowdown"}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("target", SMALL_BENCHMARKS)
def test_make_runs_each_benchmark_to_its_figures(target: str) -> None:
    arguments, expected = SMALL_BENCHMARKS[target]
    assert expected <= set(json.loads(make(target, arguments).splitlines()[-1]))


@pytest.mark.distributed
def test_make_test_gpu_runs_where_there_is_none() -> None:
    assert "failed" not in make("test-gpu", "")


def test_every_command_for_users_and_contributors_is_run_by_a_test_or_by_ci() -> None:
    run_by_tests = {
        "quickstart",
        "bench-adapters",
        "bench-between-hosts",
        "bench-stages",
        "bench-chaos",
        "bench-gpu",
        "bench-long-context",
        "bench-memory",
        "bench-plan",
        "bench-system",
        "test-browser",
        "test-gpu",
        "docs",
        *SMALL_BENCHMARKS,
    }
    in_test_all = {"test-devices", "test-harness", "test-layouts", "test-trackers"}
    ci = "".join(file.read_text() for file in (ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").iterdir()))
    run_by_ci = set(re.findall(r"^(?: *- run: )?make ([a-z0-9-]+)(?: .*)?$", ci, flags=re.MULTILINE))
    shell = [*blocks("sh"), *blocks("sh", CONTRIBUTING)]
    assert {block.split()[0] for block in shell} <= {"async-rl", "make"}
    assert (
        set(re.findall(r"^make ([a-z0-9-]+)", "".join(shell), flags=re.MULTILINE))
        == run_by_tests | run_by_ci | in_test_all
    )


def test_every_make_target_that_a_document_names_is_one() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"]:
        named = set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)", document.read_text(), flags=re.MULTILINE))
        assert {"".join(pair) for pair in named} <= targets, document.name


def test_every_link_into_the_repository_leads_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
