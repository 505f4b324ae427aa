"""Writes the tasks of a verifiers taskset as rows: `python -m async_rl.parts.environments.verifiers_rows`."""

import asyncio
import json
import sys
from collections.abc import Sequence

from async_rl.errors import ConfigError
from async_rl.parts.environments.failure import EnvironmentFailed
from async_rl.parts.environments.verifiers import PYTHON, VerifiersEnvironment
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser


async def write_rows(environment: VerifiersEnvironment, limit: int | None) -> None:
    async for row in environment.rows(limit):
        print(json.dumps(row))


def main(words: Sequence[str] | None = None) -> int:
    parser = Parser("verifiers_rows", __doc__ or "", "CONFIG [--python PYTHON] [--limit N] > rows.jsonl")
    parser.add_argument("config", metavar="CONFIG", help="as `vf-eval` reads it; [env.taskset] names the taskset")
    parser.add_argument("--python", default=PYTHON, help=f"the interpreter that has verifiers; {PYTHON} by default")
    parser.add_argument("--limit", type=int, help="the first N tasks; all by default")
    options = parser.parse_args(words)
    try:
        asyncio.run(write_rows(VerifiersEnvironment(options.config, options.python), options.limit))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
