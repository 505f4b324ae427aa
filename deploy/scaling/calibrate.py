"""`async-rl calibrate CONFIG`: short runs of a config on its own hardware, which tell `async-rl plan` what it costs.

Two, since one leaves open what is whose: one as the config is, and one that trains after the rollouts and has half of
the prompts. Nothing is evaluated, tracked or kept but their records. Exit codes: 0 success, 2 a config that cannot
run, 128 + N after signal N, otherwise that of the run that failed.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.records.run_records import RunRecords, has_iteration
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.scaling.__main__ import main as plan
from deploy.scaling.iterations import FEWEST, iterations_of, set_up_of

BESIDE, AFTER = "beside", "after"
"""Folders of the runs: that trains beside the rollouts, and after them."""

NOTHING_ELSE = (
    "--checkpoint.every=0",
    "--evaluation.sets=[]",
    "--tracking.trackers=[]",
    "--run.resume=false",
    "--train.epochs=null",
)


def runs_of(config: Config, output: Path, num_iterations: int) -> dict[Path, list[str]]:
    """The folder of each run, and the settings that it has in place of the config's."""
    short = [*NOTHING_ELSE, f"--train.iterations={num_iterations}"]
    half = max(config.train.steps_per_batch, config.prompts.prompts_per_batch // 2)
    after = ["--train.mode=synchronous", f"--prompts.prompts_per_batch={half}"]
    folders = {output / BESIDE: short, output / AFTER: [*short, *after]}
    return {folder: [*settings, f"--run.dir={folder}"] for folder, settings in folders.items()}


def _exit_code_of(command: Sequence[str]) -> int:
    """Waits for a run to end; signals that would end this process end it."""
    child, end = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True), None
    while True:
        try:
            code = child.wait()
            return code if end is None else explain_end(end)
        except Stopped as stopped:
            end = end or stopped
            child.terminate()


def make_parser() -> Parser:
    parser = Parser(
        "async-rl calibrate",
        "Runs a config for some iterations, twice, and shows what async-rl plan says of it.",
        "CONFIG [OPTIONS] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the config, a TOML file")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="of both runs; by default RUN_DIR-calibration")
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="of each run, by default 10")
    parser.add_argument("--devices", type=int, metavar="N", help="as of async-rl plan")
    parser.add_argument("--json", action="store_true", help="as of async-rl plan")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.iterations <= FEWEST:
        parser.error(f"--iterations is {options.iterations}: expected more than {FEWEST}, as the first is not counted")
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices is {options.devices}: expected at least 1")
    try:
        config = load_config(options.config, parser.overrides)
        output = options.output or Path(f"{config.run.dir}-calibration")
        if output.exists():
            raise ConfigError(
                f"{str(output)!r} exists: plan from it, with async-rl plan {output / BESIDE} {output / AFTER}, remove "
                "it, or name another folder with -o"
            )
        if config.train.mode == "synchronous" or config.run.placement == "turns":
            raise ConfigError(
                f"train.mode is {config.train.mode!r} and run.placement {config.run.placement!r}: a plan is of pools "
                'that work beside each other; take "periodic", and any placement but "turns"'
            )
        ranks, of_replica = config.trainer.num_local_ranks, config.trainer.ranks_per_replica
        if ranks != of_replica:
            raise ConfigError(
                f"trainer.num_processes is {ranks}, and a replica has {of_replica}: a plan goes by the records of one "
                f"replica, and says what others take; add --trainer.num_processes {of_replica}"
            )
        runs = runs_of(config, output, options.iterations)
        for settings in runs.values():
            load_config(options.config, [*parser.overrides, *settings])
    except AsyncRLError as error:
        print(f"async-rl calibrate: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    stop_on_signals()
    for folder, settings in runs.items():
        print(f"async-rl calibrate: {options.iterations} iterations in {folder}", file=sys.stderr)
        command = [sys.executable, "-m", "deploy.local.run", str(options.config), *parser.overrides, *settings]
        began_unix_s = time.time()
        if code := _exit_code_of(command):
            if output.exists():
                print(f"async-rl calibrate: {str(output)!r} is not complete: remove it to begin again", file=sys.stderr)
            return code
        first = next(filter(has_iteration, RunRecords(folder).metrics.new_records()))
        start_s = float(first["started_unix_s"]) - began_unix_s
        print(f"async-rl calibrate: the first iteration began after {start_s:.1f} s", file=sys.stderr)
        shutil.rmtree(folder / "model", ignore_errors=True)
        try:
            iterations_of(folder, set_up_of(folder))
        except ConfigError as error:
            print(f"async-rl calibrate: {error_text(error)}", file=sys.stderr)
            return USAGE_ERROR
    shown = ["--json"] if options.json else []
    if options.devices:
        shown.append(f"--devices={options.devices}")
    return plan([*map(str, runs), *shown])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
