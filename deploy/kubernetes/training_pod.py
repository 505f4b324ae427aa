"""The first process of a training pod: `python -m deploy.kubernetes.training_pod OPTIONS -- torchrun ...`.

torchrun exits with 1 whatever its ranks exited with. Kubernetes decides by the exit code whether to start the pods
again, so this program starts torchrun, when there is an instance, and exits with the code that the ranks' error stands
for. It records its pod for `async-rl status`; the first pod also records the launch, and counts restarts, in a file of
the run. JobSet makes all training pods anew when any of them has failed, and numbers these attempts; it sets no limit
itself (`RestartJobSetAndIgnoreMaxRestarts`). So a process, a pod and a node that are lost count alike, and the limit
has the meaning that `cluster.max_restarts` has everywhere: restarts without progress.

Exit codes: 0 trained to the end, 75 a fault that may pass with a restart, 2 bad input, 4 a fault that no restart mends,
or too many restarts, 5 fenced: another trainer has taken over the run, 143 ended by SIGTERM; Kubernetes starts the pods
again after 75, 137 and 143.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

from async_rl import errors
from async_rl.errors import AsyncRLError, ConfigError, Fenced, NoAnswer, RestartsExhausted, RunStopped, WriteFailed
from async_rl.shared.files import named_write_errors, write_file
from async_rl.shared.net.http_client import HttpClient, http_url
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.programs.failure_report import TORCHRUN_VARIABLE
from async_rl.shared.protocol.routes import HEALTH
from deploy.cluster.restarts import BAD_INPUT, DONE, FENCED, LASTING, STOPPED, Restarts, num_trained
from deploy.cluster.tasks import Task, read_launch, read_task, write_launch, write_task

FILE: Final = Path("kubernetes", "restarts.json")


def count_attempt(run_dir: Path, attempt: int, restarts: Restarts, num_trained: int, cause: str | None) -> float:
    """The seconds to wait before an attempt to train; 0 for the first one.

    Args:
        run_dir: exists.
        attempt: how often JobSet has started the pods again. A pod that was evicted comes back in the same attempt.
        restarts: the limit; receives the counts.
        num_trained: proven iterations so far.
        cause: of the last loss, where it is known.

    Raises:
        RestartsExhausted: the pods were lost too often without progress.
        WriteFailed: the count cannot be kept.
    """
    file = run_dir / FILE
    known = json.loads(file.read_text()) if file.exists() else {"attempt": 0}
    # JobSet counts from 0 again when the run is launched again.
    if known["attempt"] > attempt or attempt == 0:
        known = {"attempt": 0}
    restarts.resume(known, num_trained)
    delay_s = 0.0
    for _ in range(attempt - known["attempt"]):
        next_s = restarts.next_delay_s()
        if next_s is None:
            raise RestartsExhausted(
                f"the training pods were lost after {restarts.limit} restarts without another iteration in between "
                f"(cluster.max_restarts = {restarts.limit}); the last time: {cause or 'a pod or its node was lost'}"
            )
        delay_s = next_s
    file.parent.mkdir(exist_ok=True)
    write_file(file, json.dumps({"attempt": attempt, **restarts.counts()}) + "\n")
    return delay_s


TIMEOUT_S: Final = 1800.0
"""To a first instance, which may have to pull its image, load a model and capture graphs: a trainer waits for
`pool.timeout_s` only. Afterwards the trainer may say what is missing."""

POLL_S: Final = 2.0


def wait_for_instance(service: str, stop: threading.Event) -> None:
    """Waits until an instance behind a headless service is healthy, for `TIMEOUT_S` at most, or until `stop` is set.

    Args:
        service: the URL of the service, whose name leads to all instances.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not any(map(_is_healthy, _instances(service))) and time.monotonic() < deadline:
        if stop.wait(POLL_S):
            return


def _instances(service: str) -> list[str]:
    """The URLs of the instances that have a pod."""
    name = urlsplit(service)
    try:
        found = socket.getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [http_url(str(address[0]), int(address[1])) for *_, address in found]


def _is_healthy(url: str) -> bool:
    try:
        return HttpClient(url, POLL_S).get(HEALTH).is_success
    except NoAnswer:
        return False


MAY_PASS: Final = os.EX_TEMPFAIL
"""75, which nothing else exits with: JobSet has no limit, so Kubernetes must not start again what never came so far as
to count its attempts."""

STATES: Final[Mapping[int, str]] = {DONE: "done", MAY_PASS: "waiting", STOPPED: "stopped"}
"""Of the pod in `async-rl status`, by its exit code; all other codes mean that it has failed."""


@dataclass(frozen=True, slots=True)
class End:
    """How torchrun ended: its exit code, and the error that a rank reported first, if any: its name and its text."""

    code: int
    kind: str | None = None
    message: str | None = None


class Signals:
    """SIGTERM and SIGINT to this process, which are passed on to torchrun."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._torchrun: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def pass_on_to(self, torchrun: "subprocess.Popen[bytes]") -> None:
        self._torchrun = torchrun
        if self.stop.is_set():
            torchrun.terminate()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.stop.set()
        if self._torchrun is not None:
            self._torchrun.send_signal(number)


def exit_code(end: End, *, stop: bool) -> int:
    """The pod's exit code; `stop`: the pod was told to end."""
    if end.code == 0:
        return DONE
    if end.kind == RunStopped.__name__ or (stop and end.kind is None):
        return STOPPED
    return MAY_PASS if end.kind is None else _code_of(getattr(errors, end.kind))


def _code_of(error: type[AsyncRLError]) -> int:
    if issubclass(error, Fenced):
        return FENCED
    if error.may_pass:
        return MAY_PASS
    return BAD_INPUT if issubclass(error, ConfigError) else LASTING


def train(command: Sequence[str], signals: Signals) -> End:
    """Runs torchrun until it ends."""
    with tempfile.TemporaryDirectory(prefix="async-rl-report-") as folder:
        report = Path(folder) / "error.json"
        # torchrun copies there what the first rank that failed has reported.
        torchrun = subprocess.Popen(command, env={**os.environ, TORCHRUN_VARIABLE: str(report)})
        signals.pass_on_to(torchrun)
        return _end(torchrun.wait(), report)


def _end(code: int, report: Path) -> End:
    """After a signal there is no report, or one of torchrun."""
    if not report.exists():
        return End(code)
    reported = json.loads(report.read_text())["message"]
    # torchrun reports its own exceptions in the same way, or as a plain text.
    message = reported["message"] if isinstance(reported, dict) else ""
    kind = message.partition(":")[0]
    return End(code, kind, message) if hasattr(errors, kind) else End(code)


def name_of(index: int) -> str:
    return f"trainer-{index}"


def start_record(run_dir: Path, index: int, attempt: int, environment: Mapping[str, str]) -> Task:
    """This pod's record, with the cause of its last loss if this is another attempt."""
    pod = environment["POD_NAME"]
    task = Task(
        name_of(index), "trainer", environment.get("NODE_NAME"), pod, "running", attempt, log=f"kubectl logs {pod}"
    )
    last = read_task(run_dir, task.name) if attempt else None
    if last is None:
        return task
    lost = f"{last.id} ended without a word: the pod or its node was lost" if last.state == "running" else last.cause
    return replace(task, cause=lost)


def make_parser() -> Parser:
    parser = Parser("deploy.kubernetes.training_pod", "Runs torchrun in a training pod.", "OPTIONS -- COMMAND")
    parser.keep_rest()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--pods", type=int, required=True, help="number of training pods")
    parser.add_argument("--index", type=int, required=True, help="of this one")
    parser.add_argument("--instances", required=True, metavar="URL", help="of the service of the instances")
    parser.add_argument("--max-restarts", type=int, required=True)
    return parser


def run(options: Any, command: Sequence[str], signals: Signals) -> int:
    """Runs torchrun until it ends; returns the pod's exit code.

    Raises:
        RestartsExhausted: the pods were lost too often without progress.
        WriteFailed: the volume cannot be written to.
    """
    run_dir, attempt = options.run_dir, int(os.environ.get("RESTART_ATTEMPT") or 0)
    with named_write_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    task = start_record(run_dir, options.index, attempt, os.environ)
    record(run_dir, task)
    delay_s = 0.0
    if options.index == 0:
        write_launch(run_dir, "kubernetes", (Task(name_of(i), "trainer") for i in range(options.pods)))
        restarts = Restarts(options.max_restarts)
        try:
            # A pod that was stopped, because another one had failed, has no cause itself.
            causes = (f"{each.name}: {each.cause}" for each in read_launch(run_dir).tasks if each.cause)
            delay_s = count_attempt(run_dir, attempt, restarts, num_trained(run_dir), next(causes, None))
        except RestartsExhausted as error:
            record(run_dir, replace(task, state="failed", cause=str(error)))
            raise
    if not signals.stop.wait(delay_s):
        wait_for_instance(options.instances, signals.stop)
    end = End(STOPPED) if signals.stop.is_set() else train(command, signals)
    code = exit_code(end, stop=signals.stop.is_set())
    causes_of = {DONE: task.cause, STOPPED: None}
    cause = causes_of.get(code, end.message or f"torchrun exited with code {end.code}")
    record(run_dir, replace(task, state=STATES.get(code, "failed"), cause=cause))
    return code


def record(run_dir: Path, task: Task) -> None:
    """Writes the record, or says why it cannot: that must not change how the run ends."""
    try:
        write_task(run_dir, task)
    except WriteFailed as error:
        print(f"training_pod: async-rl status will not know this pod: {error}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        return run(options, parser.rest, Signals())
    except AsyncRLError as error:
        print(f"training_pod: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return _code_of(type(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
