"""Runs a config on this machine: `async-rl run CONFIG [--section.key VALUE ...]`.

Starts the instances and the trainer, which load at the same time; the trainer waits until the instances are healthy,
then trains, and its progress is shown. `supervisor.py` starts again what dies. However it ends (success, Ctrl-C,
SIGTERM, a failed process, `kill -9`), every process it started ends too, see `async_rl.shared.programs.process_guard`.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ProcessFailed
from async_rl.shared.locks.run_lock import LAUNCHER_LOCK_FILE, lock_run, make_run_dir
from async_rl.shared.net.http_client import HttpClient, answers_200
from async_rl.shared.programs.command_line import Parser
from deploy.cluster.live_view import make_run_view
from deploy.cluster.process import Running
from deploy.cluster.restarts import DONE, may_restart
from deploy.cluster.run_end import (
    describe_end,
    describe_finished,
    explain_end_of_run,
    is_finished,
    said_when_stopped,
    say,
)
from deploy.cluster.run_view import EVERY_VARIABLE, PLAIN_EVERY
from deploy.cluster.stopping import Stopped, report_end, stop_on_signals
from deploy.local.check import check_config, explain_refusal
from deploy.local.plan import Plan
from deploy.local.processes import POLL_S, Deployment
from deploy.local.start_checks import make_plan, require_startable
from deploy.local.supervisor import Supervisor

START_TIMEOUT_S = 1800.0
"""For an instance that is neither healthy nor ended; vLLM may take many minutes to load and capture graphs."""

PROBE_TIMEOUT_S = 2.0


def wait_until_healthy(
    instances: Sequence[Running],
    urls: Sequence[str],
    watch: Callable[[], None] = lambda: None,
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Waits until GET URL/health returns 200 at each of `urls`, one per instance; meanwhile calls `watch` repeatedly.

    Raises:
        ProcessFailed: an instance ended before it was healthy, or was not healthy within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    starting = list(zip(instances, urls, strict=True))
    while starting := [(instance, url) for instance, url in starting if not is_healthy(instance, url)]:
        watch()
        if time.monotonic() > deadline:
            process, url = starting[0][0].process, starting[0][1]
            raise ProcessFailed(
                f"{process.name} did not answer at {url}/health within {timeout_s:.0f} s; see {process.log_file}"
            )
        time.sleep(POLL_S)


def is_healthy(instance: Running, url: str) -> bool:
    """Whether GET `url`/health returns 200.

    Raises:
        ProcessFailed: it is not healthy, and the instance has ended.
    """
    if answers_200(HttpClient(url, PROBE_TIMEOUT_S), "/health"):
        return True
    if instance.exit_code() is not None:
        raise instance.failure()
    return False


def make_parser() -> Parser:
    parser = Parser(
        "async-rl run",
        "Starts the inference instances and the trainer of a config on this machine, and ends them all when it ends.",
        "CONFIG [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="as async-rl check: print what would be started and what it needs, and what is wrong; start nothing",
    )
    return parser


def run_config(
    config_path: Path,
    config: Config,
    overrides: Sequence[str],
    console: Console,
    token: str | None = None,
    every: int = PLAIN_EVERY,
) -> Plan:
    """Plans a run for this machine's cores and free ports and runs it until it ends; returns the plan.

    Args:
        token: of the fleet endpoint, for the view of the instances.
        every: an iteration is shown in a line where there is no terminal.

    Raises:
        ConfigError: the config is not usable, as far as this can be checked before anything is started.
        RunDirInUse: another launcher runs in the directory, which is left as it is.
        ProcessFailed: an instance did not start, or the trainer failed in a way that no restart mends.
        RestartsExhausted: the trainer failed more often than `cluster.max_restarts` without progress.
    """
    this_plan = make_plan(config_path, config, overrides)
    require_startable("async-rl run", config, this_plan)
    make_run_dir(config.run.dir)
    with (
        lock_run(config.run.dir, LAUNCHER_LOCK_FILE),
        make_run_view(console, config.run.dir, token, every) as view,
        ExitStack() as ended,
        Deployment() as deployment,
        said_when_stopped(view),
    ):
        instances = [deployment.start(process) for process in this_plan.instances]
        trainer, gate = deployment.start_at_gate(this_plan.trainer)

        def watch() -> None:
            _require_trainer(trainer)
            view.tick()

        wait_until_healthy(instances, this_plan.urls, watch)
        view.note(f"{len(instances)} instance(s) ready, the trainer begins")
        supervisor = Supervisor(this_plan.urls, config, deployment, instances, trainer, view)
        # When the deployment has ended all processes.
        ended.callback(supervisor.note_end)
        gate.touch()
        supervisor.run()
    return this_plan


def _require_trainer(trainer: Running) -> None:
    """
    Raises:
        ProcessFailed: it has ended in a way that no restart mends, such as by an algorithm that cannot be loaded.
    """
    code = trainer.exit_code()
    if code is None or code == DONE:
        return
    failure = trainer.failure()
    if not may_restart(code, failure.cause):
        raise failure


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    console = Console()
    stop_on_signals()
    config = None
    try:
        config = load_config(arguments.config, parser.overrides)
        if arguments.dry_run:
            return check_config(arguments.config, config, parser.overrides, elsewhere=False)
        if config.run.resume and is_finished(config):
            say(console, describe_finished(config))
            return 0
        every = int(os.environ.get(EVERY_VARIABLE, PLAIN_EVERY))
        run_config(arguments.config, config, parser.overrides, console, os.environ.get("ASYNC_RL_TOKEN"), every)
    except (Stopped, AsyncRLError) as end:
        report_end(end, os.environ)
        if arguments.dry_run:
            return explain_refusal(end)
        return explain_end_of_run(end, config, ["async-rl", "run", str(arguments.config), *parser.overrides])
    say(console, describe_end(config))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
