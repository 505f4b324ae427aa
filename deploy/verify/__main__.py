"""`async-rl verify CONFIG [--section.key VALUE ...]`: shows on the user's own set-up that the period changes nothing.

Exit codes: 0 all that was tested holds, 1 something does not, or a process failed, 2 a config that is not usable.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.records.findings import all_hold, show, write_report
from async_rl.shared.locks.run_lock import LOCK_FILE, lock_run
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.programs.command_line import Parser
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.local.machine import this_machine
from deploy.local.plan import num_ports, plan
from deploy.local.processes import Deployment
from deploy.local.start_checks import require_startable
from deploy.verify.stages import INSTANCES, Stages
from deploy.verify.verification import Scope, Verification

MARK = "verify.json"
"""Written first; a folder without it was not made by a verification and is not emptied."""

NUM_WITH_SPARE = 2
"""Instances on a CPU, where one more takes no device: one of them can be lost."""


def make_parser() -> Parser:
    parser = Parser(
        "async-rl verify",
        "Trains a few iterations of a config beside generation, and the same samples again synchronously, and compares "
        "gradients, losses and weights; diagnoses every instance; kills the trainer and an instance.",
        "CONFIG [OPTIONS] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    parser.add_argument("--iterations", type=int, default=3, help="of each run (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="kill nothing, and compare in one order only")
    parser.add_argument("--out", type=Path, help="where everything goes (default: run.dir with -verify after it)")
    return parser


def common_overrides(config: Config, words: Sequence[str], out: Path, iterations: int, num_instances: int) -> list[str]:
    """What every run of a verification sets otherwise than the config."""
    own = {
        "run.resume": "false",
        "train.iterations": str(iterations),
        "train.epochs": "null",
        "train.order": "prompt",
        "checkpoint.every": "0",
        "evaluation.sets": "[]",
        "inference.num_instances": str(num_instances),
        "cluster.max_instances": str(max(config.cluster.max_instances or 0, num_instances)),
        # Its stages are no runs that anybody wants to see beside the others of a project.
        "tracking.trackers": "[]",
    }
    if alone := config.algorithm.critic.critic_iterations_alone:
        # It is less than the number of iterations.
        own["algorithm.options.critic_iterations_alone"] = str(min(alone, iterations - 1))
    if config.publish.canary == "off":
        own["publish.canary"] = "first"
    return [*words, *(f"--{key}={value}" for key, value in own.items())]


def take_directory(out: Path, config_path: Path) -> BinaryIO:
    """An empty folder, emptied if an earlier verification left it; nobody else's until the returned file is closed.

    Raises:
        ConfigError: it holds other files, or cannot be made.
        RunDirInUse: another verification uses it.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file: give a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"--out {str(out)!r} holds files that no verification made: give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = lock_run(out)
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK_FILE:
                path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be made: {error.strerror}; give another folder") from error
    write_report(out / MARK, {"config": str(config_path)}, [])
    return lock


def verify(
    config_path: Path,
    words: Sequence[str],
    out: Path | None,
    iterations: int,
    *,
    quick: bool,
    console: Console,
    token: str | None = None,
) -> bool:
    """Verifies a config, and shows what was found; returns whether all that was tested holds.

    Raises:
        ConfigError: the config, or an option, is not usable.
        RunDirInUse: another verification uses the folder.
        ProcessFailed: an instance did not start.
    """
    started_s = time.monotonic()
    if iterations < 1:
        raise ConfigError(f"--iterations is {iterations}: give 1 or more")
    config = load_config(config_path, words)
    run_dir = config.run.dir.absolute()
    out = (out or run_dir.parent / f"{run_dir.name}-verify").absolute()
    num_instances = config.inference.num_instances
    if not quick and config.trainer.device == "cpu":
        num_instances = max(num_instances, NUM_WITH_SPARE)
    common = common_overrides(config, words, out, iterations, num_instances)
    as_run = load_config(config_path, [*common, f"--run.dir={out / INSTANCES}"])
    machine, ports = this_machine(config.trainer.device), free_ports(num_ports(as_run))
    require_startable("async-rl verify", as_run, plan(config_path, as_run, common, machine=machine, ports=ports))
    scope = Scope(config, iterations, quick, num_instances)
    with take_directory(out, config_path), Deployment() as deployment:
        stages = Stages(config_path, common, out, machine, ports, deployment, token)
        verification = Verification(stages, scope, lambda text: console.print(text, markup=False, highlight=False))
        verification.run()
    about = {
        "config": str(config_path),
        "iterations": iterations,
        "quick": quick,
        "instances": list(stages.urls),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    write_report(out / MARK, about, verification.findings)
    show(console, verification.findings, "async-rl verify")
    console.print(f"all of it is in {out / MARK}", markup=False, highlight=False, soft_wrap=True)
    return all_hold(verification.findings)


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    stop_on_signals()
    try:
        is_sound = verify(
            arguments.config,
            parser.overrides,
            arguments.out,
            arguments.iterations,
            quick=arguments.quick,
            console=Console(),
            token=os.environ.get("ASYNC_RL_TOKEN"),
        )
    except (Stopped, AsyncRLError) as end:
        return explain_end(end)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
