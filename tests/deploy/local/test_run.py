"""`python -m deploy.local.run` with stand-ins for the service and the trainer; real guards, torchrun and signals."""

import os
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

ALL = 6
"""Two instances, the trainer, and a worker of each."""


def test_a_run_ends_with_its_trainer_and_leaves_no_process(ground: Any) -> None:
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert "iteration 1/3" in output and "iteration 3/3" in output
    assert len(ground.pids()) == ALL
    assert ground.living() == {}
    log = (ground.path / "run" / "logs" / "trainer.log").read_text()
    assert 'config.toml --pool.instances ["http://127.0.0.1:' in log


def test_a_failing_trainer_is_reported_with_its_exit_code_and_last_lines(ground: Any) -> None:
    ground.then_trainer_does("raise RuntimeError('the optimizer melted')")
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    assert "ProcessFailed: trainer exited with code 1" in output
    assert "RuntimeError: the optimizer melted" in output
    assert "launch_agent" not in output, "torchrun's own traceback hides the worker's"
    assert ground.living() == {}


def test_a_named_error_of_the_trainer_is_shown_alone_with_its_log(ground: Any) -> None:
    ground.then_trainer_does(
        "from async_rl.errors import LeaderFailed, RewardError\n"
        "from async_rl.programs.failure_report import report_failure\n"
        "consequence = LeaderFailed('the leader failed')\n"
        "if os.fork() == 0:\n    report_failure(consequence, os.environ)\n    os._exit(1)\n"
        "os.wait()\n"
        "error = RewardError('reward x, prompt 3 failed')\nreport_failure(error, os.environ)\nraise error"
    )
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    shown = output[output.index("RewardError") :]
    assert shown == ("RewardError: reward x, prompt 3 failed\n(from trainer; its log is run/logs/trainer.log)\n"), (
        "the cause, not its consequence, and no traceback"
    )
    assert "Traceback" not in output
    assert "Traceback" in (ground.path / "run" / "logs" / "trainer.log").read_text()


def test_an_instance_that_does_not_come_up_is_reported(ground: Any) -> None:
    (ground.path / "inference_service.py").write_text("import sys\nsys.exit('no such model')")
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    assert "ProcessFailed: instance-0 exited with code 1" in output
    assert "no such model" in output
    assert "trainer" not in ground.pids()
    assert ground.living() == {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process(ground: Any, signum: signal.Signals) -> None:
    ground.then_trainer_does("time.sleep(300)")
    local = ground.start()
    ground.wait_for_processes(ALL)
    local.send_signal(signum)
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 128 + signum
    assert f"stopped by {signum.name}" in output
    assert ground.living() == {}


def test_ctrl_c_while_instances_start_ends_them(ground: Any) -> None:
    (ground.path / "inference_service.py").write_text(
        "import os, pathlib, time\npathlib.Path('pids').mkdir(exist_ok=True)\n"
        "pathlib.Path('pids', f'instance-{os.getpid()}.{os.getpid()}').touch()\ntime.sleep(300)"
    )
    local = ground.start()
    ground.wait_for_processes(2)
    local.send_signal(signal.SIGINT)
    local.communicate(timeout=200)
    assert local.returncode == 128 + signal.SIGINT
    assert ground.living() == {}


def test_kill_9_of_the_deployer_leaves_no_process(ground: Any) -> None:
    ground.then_trainer_does("time.sleep(300)")
    local = ground.start()
    ground.wait_for_processes(ALL)
    local.kill()
    local.communicate(timeout=200)
    assert ground.living() == {}


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace_time(ground: Any) -> None:
    ground.then_trainer_does("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nleave_pid('deaf')\ntime.sleep(300)")
    local = ground.start("--checkpoint.grace_s", "1")
    ground.wait_for_processes(ALL + 1)
    local.send_signal(signal.SIGTERM)
    local.communicate(timeout=200)
    assert ground.living() == {}


def test_a_run_goes_on_without_an_instance_that_dies(ground: Any) -> None:
    ground.then_trainer_does("while not os.path.exists('go'):\n    time.sleep(0.05)")
    local = ground.start()
    pids = ground.wait_for_processes(ALL)
    victim = next(pid for name, pid in pids.items() if name.startswith("instance"))
    os.kill(victim, signal.SIGKILL)
    assert local.stdout is not None
    said = []
    while "was ended by signal 9 (SIGKILL)" not in "".join(said):
        said.append(local.stdout.readline())
        assert said[-1], said
    assert "lost an instance" in "".join(said)
    (ground.path / "go").touch()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert ground.living() == {}


def test_a_bad_override_ends_before_anything_starts(ground: Any) -> None:
    local = ground.start("--train.iteratons", "5")
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 2
    assert "unknown key 'train.iteratons'" in output
    assert ground.pids() == {}


def test_an_interpreter_that_is_none_ends_with_the_remedy_before_anything_starts(ground: Any) -> None:
    local = ground.start("--inference.python", "no/such/python")
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 2
    assert "inference.python is 'no/such/python'" in output and "make vllm" in output
    assert not ground.pids()
