"""`async-rl dashboard RUN [RUN2 ...]`: serves the page on runs, over or in progress, from their directories.

It listens on this machine only, unless `--host` says otherwise; then it asks for a token. Exit codes: 0 success, 2 no
such run, or no such address.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from async_rl.dashboard.page import Dashboard
from async_rl.dashboard.run_records import open_run
from async_rl.dashboard.serve import DashboardServer
from async_rl.errors import ConfigError
from async_rl.net.listener import is_open_to_network, listen, url_for_others
from async_rl.programs.command_line import USAGE_ERROR, Parser
from async_rl.programs.error_text import error_text

DEFAULT_PORT = 8275
"""Not 8265, at which Ray's own dashboard listens."""

NUM_PORTS = 2**16


def make_parser() -> Parser:
    parser = Parser("async-rl dashboard", "Shows runs in a browser, live while they go on.", "RUN_DIR... [OPTIONS]")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run.dir of a run; several are compared")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 takes a free one (default {DEFAULT_PORT})")
    return parser


async def serve(runs: Sequence[Path], host: str, port: int, token: str | None) -> None:
    """Serves until it is cancelled, and prints the address first.

    Raises:
        ConfigError: a directory is not that of a run, or the address or the port cannot be used.
    """
    dashboard = Dashboard([open_run(run) for run in runs])
    if not 0 <= port < NUM_PORTS:
        raise ConfigError(f"--port {port} is not a port: expected 0 to {NUM_PORTS - 1}")
    listener = listen("the dashboard", host, port, None)
    needed = (token or secrets.token_urlsafe(16)) if is_open_to_network(listener) else None
    async with DashboardServer(dashboard, listener, needed, {host}):
        fragment = f"#token={quote(needed, safe='')}" if needed else ""
        print(f"dashboard: {url_for_others(listener)}/dashboard/{fragment}", flush=True)
        if needed:
            print("it is open to the network, unencrypted; who has the token reads prompts and responses", flush=True)
        await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(options.runs, options.host, options.port, os.environ.get("ASYNC_RL_TOKEN")))
    except ConfigError as error:
        print(f"async-rl dashboard: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
