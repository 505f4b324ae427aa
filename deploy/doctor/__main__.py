"""`async-rl doctor [CONFIG]`: examines this machine, and prints what is missing with the command that mends it.

Exit codes: 0 nothing is missing, 1 a run would fail by something found, 2 invalid input.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight.model import read_shape
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.programs.error_text import one_line
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.doctor.clocks import find_clock_facts, servers_of
from deploy.doctor.devices import find_device_facts
from deploy.doctor.finding import Finding
from deploy.doctor.host import SHARED_MEMORY, find_host_facts
from deploy.doctor.network import find_network_facts
from deploy.doctor.versions import find_versions
from deploy.local.machine_memory import host_memory

STYLES = {"ok": "green", "note": "", "warning": "yellow", "fault": "bold red"}

PIPE_WIDTH = 160


def examine(config: Config | None, named_servers: Sequence[str], shared_memory: Path) -> Iterator[Finding]:
    """Everything, one after the other; with a config, by what it needs."""
    yield from find_versions(config)
    yield from find_device_facts(config, os.environ)
    yield from find_host_facts(config, _forecast(config), host_memory(), shared_memory)
    yield from find_network_facts(config)
    yield from find_clock_facts(servers_of(config, named_servers))


def _forecast(config: Config | None) -> RunForecast | None:
    """None where the model is unknown; `async-rl check` says what is wrong with it."""
    if config is None:
        return None
    try:
        return forecast_run(config, read_shape(config.model.path))
    except ConfigError:
        return None


def show(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("state", "name", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        found = Text(one_line(finding.found))
        if finding.remedy:
            found.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(finding.state, style=STYLES[finding.state]), Text(one_line(finding.name)), found)
    console.print(table)
    num_faults = sum(finding.state == "fault" for finding in findings)
    num_warnings = sum(finding.state == "warning" for finding in findings)
    console.print(f"faults: {num_faults}, warnings: {num_warnings}")


def make_parser() -> Parser:
    parser = Parser(
        "async-rl doctor",
        "Examines this machine: versions, devices, memory, limits, ports, clocks; says how to mend what is missing.",
        "[CONFIG] [--clock URL] [--json] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="the run to be; by default any")
    parser.add_argument(
        "--clock", action="append", default=[], metavar="URL", help="compare clocks with this HTTP server; repeatable"
    )
    parser.add_argument(
        "--shared-memory", type=Path, default=SHARED_MEMORY, metavar="DIR", help="where programs share memory"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if parser.overrides and arguments.config is None:
        parser.error(f"{parser.overrides[0]} changes a config, and none is given: name the config first")
    stop_on_signals()
    try:
        config = load_config(arguments.config, parser.overrides) if arguments.config else None
        findings = list(examine(config, arguments.clock, arguments.shared_memory))
    except (Stopped, AsyncRLError) as end:
        return explain_end(end)
    if arguments.json:
        Console().out(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1), highlight=False)
    else:
        show(findings)
    return 1 if any(finding.state == "fault" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
