"""`python -m deploy.local.run` with stand-ins for the service and the trainer; real guards, torchrun and signals."""

import json
import os
import re
import signal
import time
from typing import Any

import pytest

from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

ALL = 6
"""Two instances, the trainer, and a worker of each."""


def test_a_run_ends_with_its_trainer_and_leaves_no_process(ground: Any) -> None:
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert "iteration 0, 1/3 done" in output and "iteration 2, 3/3 done" in output
    end = output[output.index("the run is trained: 3 iterations") :]
    assert "run/model" in end and all(f"async-rl {name} run" in end for name in ("dashboard", "report", "export"))
    assert len(ground.pids()) == ALL
    assert ground.living() == {}
    log = (ground.path / "run" / "logs" / "trainer.log").read_text()
    assert 'config.toml --pool.instances ["http://127.0.0.1:' in log


def test_a_failing_trainer_is_reported_with_its_exit_code_and_last_lines(ground: Any) -> None:
    ground.then_trainer_does("raise RuntimeError('the optimizer melted')")
    local = ground.start("--cluster.max_restarts", "0")
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    assert "ProcessFailed: trainer exited with code 1" in output
    assert "RuntimeError: the optimizer melted" in output
    assert "launch_agent" not in output, "torchrun's own traceback hides the worker's"
    assert ground.living() == {}


def test_a_named_error_of_the_trainer_is_shown_alone_with_its_log(ground: Any) -> None:
    ground.then_trainer_does(
        "from async_rl.errors import LeaderFailed, RewardError\n"
        "from async_rl.shared.programs.failure_report import report_failure\n"
        "consequence = LeaderFailed('the leader failed')\n"
        "if os.fork() == 0:\n    report_failure(consequence, os.environ)\n    os._exit(1)\n"
        "os.wait()\n"
        "error = RewardError('reward x, prompt 3 failed')\nreport_failure(error, os.environ)\nraise error"
    )
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    shown = output[output.index("RewardError") :]
    said = "RewardError: reward x, prompt 3 failed\n(from trainer; its log is run/logs/trainer.log)\nnothing is saved, "
    assert shown.startswith(said), "the cause, not its consequence, no traceback, and whether the run can go on"
    assert "Traceback" not in output
    assert "Traceback" in (ground.path / "run" / "logs" / "trainer.log").read_text()


def test_an_instance_that_does_not_come_up_is_reported(ground: Any) -> None:
    (ground.path / "inference_service.py").write_text("import sys\nsys.exit('no such model')")
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    assert re.search(r"ProcessFailed: instance-[01] exited with code 1", output)
    assert "no such model" in output
    assert not (ground.path / "run" / "metrics.jsonl").exists(), "the trainer has done nothing"
    assert ground.living() == {}


UNTIL_GO = "while not os.path.exists('go'):\n    time.sleep(0.05)"


def test_the_trainer_loads_beside_the_instances_and_waits_for_them(ground: Any) -> None:
    ground.before_instances_serve(UNTIL_GO)
    local = ground.start()
    ground.wait_for_processes(ALL)
    # A trainer that does not wait writes its records within some milliseconds.
    time.sleep(1)
    assert local.poll() is None and not (ground.path / "run" / "metrics.jsonl").exists()
    (ground.path / "go").touch()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert output.index("2 instance(s) ready, the trainer begins") < output.index("iteration 0, 1/3")
    assert ground.living() == {}


def test_an_instance_that_ends_while_the_trainer_waits_ends_the_run_by_its_own_error(ground: Any) -> None:
    ground.before_instances_serve(f"{UNTIL_GO}\nif port == min(map(port_of, os.listdir('pids'))): sys.exit('too big')")
    with (ground.path / "inference_service.py").open("r+") as file:
        rest = file.read()
        file.seek(0)
        # The file of an instance's process: instance-PORT.PID.
        file.write(
            "port_of = lambda name: int(name[9:].split('.')[0]) if name[:9] == 'instance-' else 1 << 16\n" + rest
        )
    local = ground.start()
    ground.wait_for_processes(ALL)
    (ground.path / "go").touch()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    shown = output[output.index("ProcessFailed") :]
    assert shown.startswith("ProcessFailed: instance-") and "exited with code 1" in shown and "too big" in shown
    assert "trainer" not in output and not (ground.path / "run" / "metrics.jsonl").exists()
    assert ground.living() == {}


def test_a_trainer_that_no_restart_mends_ends_the_run_while_the_instances_load(ground: Any) -> None:
    ground.before_instances_serve("time.sleep(300)")
    ground.before_trainer_waits(
        "from async_rl.errors import ConfigError\n"
        "from async_rl.shared.programs.failure_report import report_failure\n"
        "report_failure(ConfigError('no such algorithm'), os.environ)\nsys.exit(2)"
    )
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 2, "as where the same error is found before the start"
    assert "ConfigError: no such algorithm\n(from trainer;" in output
    assert ground.living() == {}


def test_a_trainer_that_dies_while_the_instances_load_is_started_again_once_they_are_ready(ground: Any) -> None:
    ground.before_instances_serve(UNTIL_GO)
    ground.before_trainer_waits("if '--run.resume=true' not in sys.argv: os.kill(os.getpid(), 9)")
    local = ground.start()
    # The trainer's worker may end with it before it has left its id.
    ground.wait_for_processes(ALL - 1)
    (ground.path / "go").touch()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert output.index("ready") < output.index("lost trainer") < output.index("(restart 1)")
    assert ground.living() == {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process(ground: Any, signum: signal.Signals) -> None:
    ground.then_trainer_does("time.sleep(300)")
    local = ground.start()
    ground.wait_for_processes(ALL)
    ground.wait_for_iterations()
    local.send_signal(signum)
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 128 + signum
    assert f"stopped by {signum.name}: the trainer saves its last whole iteration" in output
    assert "nothing is saved" in output
    assert ground.living() == {}
    tasks = json.loads((ground.path / "run" / "launch.json").read_text())["tasks"]
    assert {task["state"] for task in tasks} == {"ended"}, "nothing of it runs any more"


def test_ctrl_c_while_instances_start_ends_them_and_the_waiting_trainer(ground: Any) -> None:
    (ground.path / "inference_service.py").write_text(
        "import os, pathlib, time\npathlib.Path('pids').mkdir(exist_ok=True)\n"
        "pathlib.Path('pids', f'instance-{os.getpid()}.{os.getpid()}').touch()\ntime.sleep(300)"
    )
    local = ground.start()
    # Two instances; the trainer and its worker, which are waiting.
    ground.wait_for_processes(4)
    local.send_signal(signal.SIGINT)
    local.communicate(timeout=200)
    assert local.returncode == 128 + signal.SIGINT
    assert ground.living() == {}


def test_kill_9_of_the_deployer_leaves_no_process(ground: Any) -> None:
    ground.then_trainer_does("time.sleep(300)")
    local = ground.start()
    ground.wait_for_processes(ALL)
    ground.wait_for_iterations()
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


def test_a_trainer_that_dies_once_is_started_again_with_resume_beside_the_same_instances(ground: Any) -> None:
    ground.then_trainer_does("if '--run.resume=true' not in sys.argv: os.kill(os.getpid(), 9)")
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert "lost trainer, it is started again in 1 s" in output and "(restart 1)" in output
    names = [path.name.rpartition(".")[0] for path in (ground.path / "pids").iterdir()]
    assert names.count("trainer") == 2 and len([name for name in names if name.startswith("instance")]) == 2
    assert ground.living() == {}
    record = json.loads((ground.path / "run" / "launch.json").read_text())
    assert [(task["name"], task["state"], task["restarts"]) for task in record["tasks"]] == [
        ("trainer", "done", 1),
        ("instance-0", "ended", 0),
        ("instance-1", "ended", 0),
    ]


def test_a_trainer_that_always_dies_ends_the_run_by_name_in_bounded_time(ground: Any) -> None:
    ground.then_trainer_does("os.kill(os.getpid(), 9)")
    local = ground.start("--cluster.max_restarts", "2")
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    assert "RestartsExhausted: trainer was started again 2 times without another iteration" in output
    assert output.count("exitcode: -9") == 3, "each loss is told, with its cause from torchrun's report"
    assert ground.living() == {}


def test_an_instance_that_dies_is_started_again_on_its_port(ground: Any) -> None:
    ground.then_trainer_does("while not os.path.exists('go'):\n    time.sleep(0.05)")
    local = ground.start()
    pids = ground.wait_for_iterations()
    name, victim = next((name, pid) for name, pid in pids.items() if name.startswith("instance"))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: ground.pids()[name] != victim or len(list((ground.path / "pids").glob(f"{name}.*"))) >= 2)
    (ground.path / "go").touch()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert "lost instance-" in output and "SIGKILL" in output and "(restart 1)" in output
    assert ground.living() == {}


def test_with_no_instance_left_the_trainer_is_not_started_again(ground: Any) -> None:
    ground.then_trainer_does(
        "while not os.path.exists('go'):\n    time.sleep(0.05)\ntime.sleep(1)\nraise RuntimeError('nobody samples')"
    )
    local = ground.start("--cluster.max_restarts", "0", "--inference.num_instances", "1")
    pids = ground.wait_for_iterations()
    os.kill(next(pid for name, pid in pids.items() if name.startswith("instance")), signal.SIGKILL)
    (ground.path / "go").touch()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 1
    assert "lost instance-0, it is not started again" in output and "nobody samples" in output
    assert ground.living() == {}


def test_a_record_that_cannot_be_written_does_not_end_the_run(ground: Any) -> None:
    record = ground.path / "run" / "launch.json"
    record.mkdir(parents=True)
    local = ground.start()
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 0, output
    assert "async-rl status does not show the present state: cannot write 'run/launch.json'" in output
    assert ground.living() == {}


def test_several_training_hosts_are_refused(ground: Any) -> None:
    local = ground.start("--cluster.training_nodes", "2", "--prompts.prompts_per_batch", "2")
    output, _ = local.communicate(timeout=200)
    assert local.returncode == 2
    assert "cluster.training_nodes is 2" in output and "async-rl launch" in output
    assert ground.pids() == {}


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
