"""Runs one program: Python in this interpreter, which saves starting another, or a command of the system."""

from __future__ import annotations

import os
import sys

from async_rl.parts.sandbox.inside.confinement import as_stdin, confine, run_as_main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main(connection: int, request: dict[str, Any]) -> None:
    confine(request)
    os.close(connection)
    as_stdin(request["stdin"])
    if request["argv"]:
        try:
            os.execvp(request["argv"][0], request["argv"])
        except OSError as error:
            print(f"{request['argv'][0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    path = os.path.join(os.getcwd(), "program.py")
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(request["source"])
    sys.exit(run_as_main(request["source"], path))
