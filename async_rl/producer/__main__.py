"""`python -m async_rl.producer`: the producer of a run, started by the trainer's main rank (`process.py`).

It reads one line of standard input, the run as JSON (`Given`), writes one line, `{"port": N}` or `{"failed": error}`,
and ends with the main rank's connection. SIGINT and SIGTERM are for the ranks: they save first, and then end it.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.producer.frames import error_as_data
from async_rl.producer.process import Given
from async_rl.producer.program import serve
from async_rl.shared.programs.process_guard import end_with_parent


def main() -> None:
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=Given)
    with os.fdopen(os.dup(1), "w") as said:
        # What a user's code prints belongs into the log.
        os.dup2(2, 1)

        def say(answer: Mapping[str, Any]) -> None:
            said.write(msgspec.json.encode(answer).decode() + "\n")
            said.flush()

        try:
            serve(given, lambda port: say({"port": port}))
        except AsyncRLError as error:
            # Before it has said its port: later ones go through the connection.
            say({"failed": error_as_data(error)})


if __name__ == "__main__":
    main()
    logging.shutdown()
    # Threads of libraries are not waited for.
    os._exit(0)
