"""Runs a config on a Ray cluster: `async-rl launch ray CONFIG [--section.key VALUE ...]`.

The launcher stays: it watches the tasks, starts again what is lost, and shows the run's progress. However it ends, all
tasks end too, the trainer before the instances where there is time for that.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from async_rl.checks.preflight import require_sound
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.programs.extras import require_extras
from deploy.cluster.live_view import make_run_view
from deploy.cluster.plan import plan_cluster
from deploy.cluster.run_end import (
    describe_end,
    describe_finished,
    explain_end_of_run,
    is_finished,
    said_when_stopped,
    say,
)
from deploy.cluster.stopping import Stopped, stop_on_signals
from deploy.ray.specs import describe


def make_parser() -> Parser:
    parser = Parser(
        "async-rl launch ray",
        "Starts the training nodes and the instances of a config on the Ray cluster that RAY_ADDRESS names, or that "
        "this host is part of, and ends them all when it ends.",
        "CONFIG [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config, as all hosts see it")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be asked of Ray and run; start nothing"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    stop_on_signals()
    config = None
    try:
        config = load_config(arguments.config, parser.overrides)
        plan = plan_cluster(arguments.config, config, parser.overrides)
        if arguments.dry_run:
            print(describe(plan), flush=True)
            require_sound(config, trains=True, serves=True)
            return 0
        require_extras("async-rl launch ray", "ray")
        require_sound(config, trains=True, serves=True)
        # Ray takes seconds to import, and may be missing.
        from deploy.ray.driver import run_on_ray

        token = os.environ.get("ASYNC_RL_TOKEN")
        if config.run.resume and is_finished(config):
            say(Console(), describe_finished(config))
            return 0
        with make_run_view(Console(), config.run.dir, token) as view, said_when_stopped(view):
            run_on_ray(plan, token, view)
    except (Stopped, AsyncRLError) as end:
        return explain_end_of_run(end, config, ["async-rl", "launch", "ray", str(arguments.config), *parser.overrides])
    say(Console(), describe_end(config))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
