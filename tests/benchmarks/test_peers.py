"""What the comparison counts; our side of it runs, on a case of seconds; nothing of it is left after a signal."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common.case import Case
from benchmarks.peers.__main__ import DEFAULT, Contest, Measurement, Pair
from benchmarks.peers.loss_cases import CASES
from benchmarks.peers.processes import Mark
from benchmarks.peers.sides import Speed, run_ours, speed_between
from benchmarks.peers.work import EMBEDDED
from tests.support import ROOT
from tests.support.waiting import wait_for

TINY = Case.parse("tiny:20:2:2")
END_TIMEOUT_S = 20.0
TRL_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

TREE = """#!/bin/sh
sleep 1000 &
echo $$ $! > {pids}.new && mv {pids}.new {pids}
wait
"""
"""In place of an interpreter with TRL: a process with a child."""


def test_speeds_are_tokens_between_two_marks() -> None:
    speed = speed_between(Mark(10.0, 100.0), Mark(14.0, 102.0), 80)
    assert speed.per_cpu_s == 20.0 and speed.per_s == 40.0


def test_figures_are_medians_over_the_pairs_of_each_contest() -> None:
    measurement = Measurement(5, EMBEDDED, "", minutes=0.0)
    contest = Contest(Case.parse("2M:80:1:1"), 0.05)
    measurement.pairs[contest] = [Pair(Speed(a, 1.0), Speed(2.0, 1.0)) for a in (2.0, 4.0, 10.0)]
    measurement._micro_batches[contest.case] = 8
    figures = measurement.figures()
    assert figures["cpu_ratio.2M:80:1:1:kl=0.05"] == 2.0 and figures["pairs.2M:80:1:1:kl=0.05"] == 3


def test_no_pair_begins_after_the_deadline() -> None:
    measurement = Measurement(5, EMBEDDED, "/no/python", minutes=-1.0)
    measurement.add_pair(Contest(TINY, 0.0))
    assert not measurement.pairs


@pytest.mark.distributed
def test_our_side_is_measured_in_a_real_run() -> None:
    speed = run_ours(TINY, 0.05, 4, EMBEDDED)
    assert speed.per_cpu_s > 0 and speed.per_s > 0


@pytest.mark.distributed
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason=f"{TRL_PYTHON} is missing: `make test-peers` makes it")
def test_both_sides_compute_the_same_loss_and_gradient_from_the_same_samples() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--json", "--trl-python", str(TRL_PYTHON), "--minutes", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Float32 on both sides; later steps begin with weights that were rounded differently.
    for name in CASES:
        assert found.get(f"loss_difference.{name}", 0.0) < 3e-6 and found[f"grad_norm_difference.{name}"] < 5e-6, name
    assert len(CASES) >= 20 and sum(case.given is None for case in CASES.values()) >= 20
    assert len(found["left_out"]) == len(DEFAULT)


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason=f"{TRL_PYTHON} is missing: `make test-peers` makes it")
@pytest.mark.parametrize(
    "arguments",
    [
        {"per_device_train_batch_size": 4, "num_generations": 2, "num_train_epochs": 1.5},
        {
            **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
            **{"num_generations": 2, "num_train_epochs": 1.5, "lr_scheduler_type": "constant"},
        },
        {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 6, "lr_scheduler_type": "constant"},
    ],
    ids=["an epoch and a half", "two steps per batch", "so many steps"],
)
def test_steps_epochs_rates_and_tokens_are_counted_as_by_trl(
    tiny_model: Callable[..., Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """`async_rl.trl` and TRL itself run the same script; responses of one token, as samples are not the same."""
    found = []
    for python, module in ((str(TRL_PYTHON), "trl"), (sys.executable, "async_rl.trl")):
        command = [python, str(Path(__file__).with_name("trl_counts.py")), module, str(tiny_model("qwen3"))]
        command += [str(tmp_path / module), json.dumps(arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (steps, most, logs), (our_steps, our_most, our_logs) = found
    assert (our_steps, our_most) == (steps, most) and our_steps > 1
    # A log for each batch here, which may have several steps.
    by_step = {step: rest for step, *rest in logs}
    assert our_logs and our_logs[-1][0] == steps
    for step, *rest in our_logs:
        assert rest == pytest.approx(by_step[step], rel=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    pids, program = tmp_path / "pids", tmp_path / "python"
    program.write_text(TREE.format(pids=pids))
    program.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.peers", "--json", "--trl-python", str(program)]
    benchmark = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        wait_for(pids.exists)
        tree = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        tree += psutil.Process(benchmark.pid).children(recursive=True)
        benchmark.send_signal(number)
        _, alive = psutil.wait_procs(tree, END_TIMEOUT_S)
        assert not alive
    finally:
        benchmark.kill()
        benchmark.communicate()
