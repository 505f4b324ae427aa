"""One trainer at a time: a second one is refused; a stopped one is replaced, and changes nothing afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from async_rl.shared.checkpoint_names import whole_checkpoints
from async_rl.shared.locks.lease import TTL_S, read_term
from async_rl.shared.net.free_ports import free_ports
from tests.support.local_run import Run, command_of
from trainer.checkpoint.files import find_damage, read_manifest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

STEP_S = 200.0
"""For a trainer to start and train two iterations, beside another one that has just stopped."""


class Trainers:
    """Trainers of one run, one after the other, and an instance that finds each of them in the run's directory."""

    def __init__(self, run: Run, model: Path) -> None:
        self.run = run
        self.outputs: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        run.dir.mkdir()
        # Two trainers share the machine with it, of which one may compute all the time.
        run.config.write_text(run.config.read_text().replace(":vowels", ":slow"))
        serve = [
            "inference_service",
            "--model",
            str(model),
            "--port",
            "0",
            "--register",
            str(run.dir),
            "--name",
            "only",
        ]
        self.instance = self._start("instance", serve)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        (port,) = free_ports(1)
        words = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "async_rl.trainer",
            str(self.run.config),
        ]
        words += [f"--pool.fleet_address=127.0.0.1:{port}", "--pool.timeout_s=120"]
        words += ["--run.resume=true", "--checkpoint.every=1", "--train.iterations=500"]
        return self._start(f"trainer-{name}", words)

    def _start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        self.outputs.append(self.run.output.with_name(f"{name}.txt"))
        with self.outputs[-1].open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        return process

    def said(self) -> str:
        return "\n".join(f"--- {output.name}\n{output.read_text()}" for output in self.outputs)

    def wait_for(self, condition: Callable[[], bool], alive: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + STEP_S
        while not condition():
            assert alive.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def versions(self) -> list[str]:
        """The weight version of each whole line of the ledger."""
        return [str(row["weight_version"]) for row in self.run.lines("ledger.jsonl")]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                for part in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    part.kill()
                process.wait()


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [part for part in psutil.Process(launcher.pid).children() if "async_rl.trainer" in command_of(part)]


def test_a_second_trainer_is_refused_and_a_stopped_one_is_replaced_and_ends_when_it_goes_on(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    trainers = Trainers(Run(tmp_path, tiny_model("qwen3", tied=True)), tiny_model("qwen3", tied=True))
    try:
        first = trainers.start("first")
        trainers.wait_for(lambda: len(trainers.versions()) >= 1, first)
        _refuse(trainers, first)
        _take_over(trainers, first)
    finally:
        trainers.close()


def _refuse(trainers: Trainers, first: subprocess.Popen[bytes]) -> None:
    refused = trainers.start("refused")
    assert refused.wait(STEP_S) == 1
    said = (trainers.run.output.parent / "trainer-refused.txt").read_text()
    assert "RunDirInUse" in said and "is in use by" in said, said
    num_before = len(trainers.versions())
    trainers.wait_for(lambda: len(trainers.versions()) > num_before + 1, first)


def _take_over(trainers: Trainers, first: subprocess.Popen[bytes]) -> None:
    run = trainers.run
    ranks = ranks_of(first)
    assert len(ranks) == 2
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    stopped_s, old_run = time.monotonic(), trainers.versions()[-1].rpartition("-")[0]
    second = trainers.start("second")
    trainers.wait_for(lambda: sum(old_run not in version for version in trainers.versions()) >= 2, second)
    assert time.monotonic() - stopped_s > TTL_S
    term = read_term(run.dir)
    assert term is not None and term.term == 2, trainers.said()
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)
    resumed_s = time.monotonic()
    assert first.wait(120) == 1, "torchrun's own code"
    fenced_s = time.monotonic() - resumed_s
    said = (run.output.parent / "trainer-first.txt").read_text()
    assert "Fenced: term 1 of run.dir" in said and re.search(r"exitcode\s*: 5 ", said), said
    print(f"the first trainer ended {fenced_s:.1f} s after it went on")
    num_before = len(trainers.versions())
    trainers.wait_for(lambda: len(trainers.versions()) >= num_before + 2, second)
    assert (
        json.loads((run.dir / "fleet.json").read_text())["url"]
        in (run.output.parent / "trainer-second.txt").read_text()
    )
    second.terminate()
    second.wait(120)
    _require_one_history(run, old_run)
    assert trainers.instance.poll() is None, "it waits for the next trainer"


def _require_one_history(run: Run, old_run: str) -> None:
    """Every iteration once and proven, first those of the old trainer, then those of the new one alone."""
    for name in ("ledger.jsonl", "metrics.jsonl"):
        rows = run.lines(name)
        assert [row["iteration"] for row in rows] == list(range(len(rows))), name
        of_old = [old_run in str(row["weight_version"]) for row in rows]
        assert of_old == sorted(of_old, reverse=True), f"{name}: {of_old}"
    assert all(row["on_policy"] for row in run.lines("ledger.jsonl"))
    checkpoints = list(whole_checkpoints(run.dir / "checkpoints"))
    assert checkpoints
    for checkpoint in checkpoints:
        assert find_damage(checkpoint, read_manifest(checkpoint)["files"]) is None
