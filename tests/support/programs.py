"""Python programs on hosts of `benchmarks.common.hosts`, which end with the test."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.common.hosts import Host, environment

TOKEN = "between hosts"


class Programs:
    """Starts programs, all with the same token; `close` kills those that still run, with all that they started."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host, words: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
        """Runs `words` on a host, with the output in a file."""
        with output.open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    host.command(words), stdout=log, stderr=subprocess.STDOUT, env=environment(ASYNC_RL_TOKEN=TOKEN)
                )
            )
        return self._started[-1]

    def start_module(self, host: Host, words: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
        return self.start(host, [sys.executable, "-m", *words], output)

    def wait_for(self, output: Path, text: str, after: str = "", timeout_s: float = 60.0) -> str:
        """The whole output of a program, once it has `text` and something more that has `after`."""
        deadline = time.monotonic() + timeout_s
        while text not in (said := output.read_text()) or after not in said.split(text, 1)[1]:
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        return said

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                for part in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    part.kill()
                process.wait()
