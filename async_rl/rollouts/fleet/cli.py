"""`async-rl fleet`: shows and changes the instances of a running run, at its fleet endpoint.

Exit codes: 0 success, 1 the endpoint failed or disappeared, 2 invalid input: no such run, instance, or valid token.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.config.texts import said_of
from async_rl.errors import ConfigError, UnknownInstance
from async_rl.rollouts.fleet.endpoint import EndpointFailed, FleetClient, find_endpoint
from async_rl.shared.programs.command_line import Commands, Parser
from async_rl.shared.programs.error_text import error_text, one_line
from async_rl.shared.protocol.fleet import AddRequest, FleetInfo, NameRequest
from async_rl.shared.protocol.routes import FLEET_ADD, FLEET_DRAIN, FLEET_REMOVE

POLL_S = 0.5
PIPE_WIDTH = 240
"""Columns of the table if the output is not a terminal."""

STYLES = {"ready": "green", "dead": "red", "draining": "yellow", "stale": "yellow", "joining": "cyan"}

Body = TypeVar("Body", bound=BaseModel)


def fleet_table(fleet: FleetInfo) -> Table:
    """One row per instance, and below it the version and the desired number of instances."""
    wanted = "" if fleet.desired_instances is None else f"; {fleet.desired_instances} would balance the pools"
    caption = f"version {fleet.version or 'none: a publish is going on'}{wanted}"
    table = Table(box=None, caption=Text(caption), caption_justify="left", pad_edge=False)
    for name in ("name", "url", "state", "version"):
        table.add_column(name)
    for name in ("outstanding", "tokens/s", "requests", "failures"):
        table.add_column(name, justify="right")
    table.add_column("reason", overflow="fold")
    for info in fleet.instances:
        table.add_row(
            Text(one_line(info.name)),
            Text(info.url),
            Text(info.state, style=STYLES[info.state]),
            Text(info.version or "-"),
            f"{info.outstanding_tokens:,}",
            f"{info.tokens_per_s:,.0f}",
            f"{info.num_requests}",
            f"{info.num_failures}",
            Text(one_line(info.reason or "")),
        )
    return table


def _list(client: FleetClient, arguments: argparse.Namespace) -> None:
    fleet = client.info()
    if arguments.json:
        Console().out(fleet.model_dump_json(indent=2), highlight=False)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(fleet_table(fleet))


def _add(client: FleetClient, arguments: argparse.Namespace) -> None:
    info = client.post(FLEET_ADD, _body(AddRequest, url=arguments.instance_url.rstrip("/"), name=arguments.name))
    print(f"{info.name} ({info.url}) is {info.state}: {one_line(info.reason or 'it serves')}")


def _drain(client: FleetClient, arguments: argparse.Namespace) -> None:
    info = client.post(FLEET_DRAIN, _body(NameRequest, name=arguments.name))
    print(f"{info.name} drains: it finishes {info.outstanding_tokens:,} expected tokens and takes nothing new")
    if not arguments.wait:
        return
    while found := [other for other in client.info().instances if (other.name, other.url) == (info.name, info.url)]:
        if found[0].state != "draining":
            raise EndpointFailed(f"{info.name} is {found[0].state} again before it left: was it started anew?")
        time.sleep(POLL_S)
    print(f"{info.name} has left the pool")


def _remove(client: FleetClient, arguments: argparse.Namespace) -> None:
    info = client.post(FLEET_REMOVE, _body(NameRequest, name=arguments.name))
    print(f"{info.name} ({info.url}) is removed; its unfinished responses go on elsewhere")


def _body(kind: type[Body], **fields: str | None) -> Body:
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]} {first['input']!r}: {said_of(first)}") from error


def _parsers() -> dict[str, Parser]:
    """The parser of each command; all have options to locate the endpoint."""
    listing = Parser("async-rl fleet ls", "Shows the instances.", "[OPTIONS]")
    listing.add_argument("--json", action="store_true", help="as the endpoint answers")
    add = Parser("async-rl fleet add", "Adds an instance that does not register itself.", "URL [OPTIONS]")
    add.add_argument("instance_url", metavar="URL", help="http://host:port of the instance")
    add.add_argument("--name", help="by default its host and port")
    drain = Parser("async-rl fleet drain", "Lets an instance finish what it has, then leave.", "NAME [OPTIONS]")
    drain.add_argument("name", metavar="NAME", help="its name or URL")
    drain.add_argument("--wait", action="store_true", help="return when it has left")
    remove = Parser("async-rl fleet remove", "Takes an instance out at once.", "NAME [OPTIONS]")
    remove.add_argument("name", metavar="NAME", help="its name or URL")
    parsers = {"ls": listing, "add": add, "drain": drain, "remove": remove}
    for parser in parsers.values():
        parser.add_argument("--url", help="the fleet endpoint")
        parser.add_argument(
            "--run", type=Path, metavar="RUN_DIR", help="run.dir of the run; by default the newest in ./runs"
        )
    return parsers


COMMANDS = {"ls": _list, "add": _add, "drain": _drain, "remove": _remove}


def main(argv: Sequence[str]) -> int:
    command, arguments = Commands("async-rl fleet", "The instances of a run that goes on.", _parsers()).parse(argv)
    try:
        address = find_endpoint(arguments.url, arguments.run)
        client = FleetClient(address.url, os.environ.get("ASYNC_RL_TOKEN"), address.run)
        COMMANDS[command](client, arguments)
    except (ConfigError, UnknownInstance) as error:
        print(f"async-rl fleet: {error_text(error)}", file=sys.stderr)
        return 2
    except EndpointFailed as error:
        print(f"async-rl fleet: {error_text(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
