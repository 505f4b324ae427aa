"""`async-rl check CONFIG`: what a run would be and need, and everything that is wrong with it; starts nothing.

`async-rl run --dry-run` is the same. It reads no weights, and imports neither torch nor transformers: a process of its
own renders rows and calls the reward once. Exit code 0 if the config can run, 2 if it cannot.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight import find_faults, find_missing_files
from async_rl.checks.preflight.model import read_shape
from async_rl.config.cluster_section import TOKEN_VARIABLE
from async_rl.config.file import load_config
from async_rl.config.secrets import masked
from async_rl.config.sections import Config
from async_rl.config.sources import DEFAULT, SourcedValue, sourced_values
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.shared.programs.command_line import Parser
from deploy.cluster.plan import ClusterPlan, plan_cluster
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.local.check_view import show_check, show_verdict
from deploy.local.machine import VISIBLE, find_devices
from deploy.local.machine_memory import device_memory, host_memory
from deploy.local.memory_fit import Capacity, find_misfits
from deploy.local.plan import Plan
from deploy.local.start_checks import make_plan, require_addresses, require_engine, require_packages
from deploy.local.torch_build import require_torch_for

VARIABLES = (TOKEN_VARIABLE, *VISIBLE.values(), "OMP_NUM_THREADS")

LIBRARIES = ("HF_", "NCCL_", "HCCL_", "GLOO_", "VLLM_")
"""Prefixes of the variables of libraries that decide where files come from, and over which network ranks talk."""

NOT_YET = "the run cannot start yet: "
"""Before a warning of what a run lacks that may come."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Check:
    """What was found about a config. `plan` is None if the run is for other machines, or cannot be planned for this
    one; `cluster_plan` then has its tasks if a launcher starts them all. `forecast` is None if the model is unknown.

    `errors` prevent the run; `warnings` do not, or cannot be decided here; `notes` say what settings mean for the rows.
    """

    values: tuple[SourcedValue, ...]
    plan: Plan | None
    cluster_plan: ClusterPlan | None
    forecast: RunForecast | None
    capacity: Capacity | None
    errors: tuple[ConfigError, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def why_elsewhere(config: Config) -> str | None:
    """Why `async-rl run` does not start all of a config's processes on this machine; None if it does."""
    if config.cluster.training_nodes > 1:
        return f"cluster.training_nodes is {config.cluster.training_nodes}: start it with async-rl launch"
    if config.pool.instances:
        return "its instances run elsewhere (pool.instances): start the trainer with torchrun -m async_rl.trainer"
    return None


def environment_values(environment: Mapping[str, str]) -> list[SourcedValue]:
    """The variables that are set and that a run reads, the token masked."""
    names = [name for name in environment if name in VARIABLES or name.startswith(LIBRARIES)]
    return [SourcedValue(name, masked(name, environment[name]), "environment") for name in sorted(names)]


def check_run(config_path: Path, config: Config, overrides: Sequence[str], *, elsewhere: bool) -> Check:
    """Looks at a config and, unless it runs elsewhere, at this machine.

    Args:
        config_path, overrides: where `config` was read from.
        elsewhere: the run is for other machines: devices, memory, packages and files of this one do not count.
    """
    reason = why_elsewhere(config)
    errors: list[ConfigError] = []
    warnings = [reason] if reason else []
    notes: list[str] = []
    elsewhere = elsewhere or reason is not None
    missing = list(map(str, find_missing_files(config)))
    warnings += [f"{NOT_YET}{message}" for message in missing]
    if not elsewhere:
        _tried(errors, lambda: require_packages("async-rl run", config))
    # The other checks may need these packages.
    for fault in [] if errors else find_faults(config, trains=True, serves=True, is_whole=not missing):
        if elsewhere and fault.is_of_place:
            warnings.append(f"on this machine: {fault.error}")
        else:
            errors.append(fault.error)
    plan = _tried(errors, lambda: None if elsewhere else make_plan(config_path, config, overrides))
    if plan is not None:
        _tried(errors, lambda: require_torch_for(config.trainer.device))
    cluster_plan = None
    # Both pools on one device are for `async-rl run` on another machine, unless the config asks for several.
    is_launched = config.cluster.training_nodes > 1 or config.run.placement == "separate"
    if elsewhere and is_launched and not config.pool.instances:
        cluster_plan = _tried(errors, lambda: plan_cluster(config_path, config, overrides))
    forecast = _forecast(config, errors)
    capacity = None
    if not elsewhere:
        _tried(errors, lambda: require_addresses(config))
        capacity = Capacity(host_memory(), _device_memory(config.trainer.device))
        if plan is not None and not missing:
            _tried(errors, lambda: require_engine(config, plan.instances[0]))
        if forecast is not None:
            misfits = find_misfits(config, forecast, capacity)
            errors += misfits.errors
            warnings += misfits.warnings
    if not (errors or elsewhere or missing):
        _try_out(config_path, overrides, errors, warnings, notes)
    values = (*sourced_values(config_path, config, overrides), *environment_values(os.environ))
    return Check(values, plan, cluster_plan, forecast, capacity, tuple(errors), tuple(warnings), tuple(notes))


def check_config(
    config_path: Path, config: Config, overrides: Sequence[str], *, elsewhere: bool, shows_all: bool = False
) -> int:
    """Prints what `check_run` found, and whether the config can run; returns 0 if it can.

    Raises:
        ConfigError: the config cannot run; with one line for each reason.
    """
    check = check_run(config_path, config, overrides, elsewhere=elsewhere)
    values = [each for each in check.values if shows_all or each.source != DEFAULT]
    show_check(
        values,
        check.plan,
        check.cluster_plan,
        check.forecast,
        check.capacity,
        check.warnings,
        check.notes,
        num_left_out=len(check.values) - len(values),
    )
    if len(check.errors) == 1:
        # Of its own class: a directory in use may be free later.
        raise check.errors[0]
    if check.errors:
        raise ConfigError("\n".join(map(str, check.errors)))
    is_elsewhere = elsewhere or why_elsewhere(config) is not None
    is_ready = not any(warning.startswith(NOT_YET) for warning in check.warnings)
    show_verdict(len(check.warnings), is_elsewhere=is_elsewhere, is_ready=is_ready)
    return 0


def _try_out(
    config_path: Path, overrides: Sequence[str], errors: list[ConfigError], warnings: list[str], notes: list[str]
) -> None:
    """Rows and reward, as a process of its own tries them: see `async_rl.checks.preflight.trial`."""
    argv = [sys.executable, "-m", "async_rl.checks.preflight.trial", str(config_path), *overrides]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        warnings.append(f"rows and reward could not be tried: the process ended with code {done.returncode}")
        return
    # The rewards that it calls may print, too.
    trial = json.loads(done.stdout.splitlines()[-1])
    errors += map(ConfigError, trial["errors"])
    warnings += trial["warnings"]
    notes += trial["notes"]


def explain_refusal(end: Stopped | AsyncRLError) -> int:
    """Prints what is wrong with a config, and the verdict; returns the exit code."""
    code = explain_end(end)
    if isinstance(end, ConfigError):
        print("\nverdict: this config cannot run; what is to be corrected stands above", file=sys.stderr)
    return code


def _forecast(config: Config, errors: list[ConfigError]) -> RunForecast | None:
    """The forecast; what prevents it is among the errors already if it is wrong with the model itself."""
    try:
        return forecast_run(config, read_shape(config.model.path))
    except ConfigError as error:
        if not errors:
            errors.append(error)
        return None


def _tried(errors: list[ConfigError], make: Callable[[], Result]) -> Result | None:
    try:
        return make()
    except ConfigError as error:
        errors.append(error)
        return None


def _device_memory(kind: str) -> int | None:
    """Of the smallest device that is named; what names none, or one twice, is an error of the plan."""
    try:
        return device_memory(kind, find_devices(kind, os.environ, asks_torch=False))
    except ConfigError:
        return None


def make_parser() -> Parser:
    parser = Parser(
        "async-rl check",
        "Shows what a run would be, where each of its settings comes from, what memory it needs, and what is wrong.",
        "CONFIG [--elsewhere] [--all] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run is for other machines: do not compare it with devices, memory, packages and data of this one",
    )
    parser.add_argument("--all", action="store_true", help="print the settings that have their defaults, too")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    stop_on_signals()
    try:
        config = load_config(arguments.config, parser.overrides)
        return check_config(
            arguments.config, config, parser.overrides, elsewhere=arguments.elsewhere, shows_all=arguments.all
        )
    except (Stopped, AsyncRLError) as end:
        return explain_refusal(end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
