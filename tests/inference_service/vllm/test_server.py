"""The supervisor of vLLM's server, with a small program in vLLM's place that starts a worker."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ProcessFailed
from async_rl.rollouts.fleet.server import FleetServer
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from inference_service.vllm.command import Command
from inference_service.vllm.scratch import PREFIX, SEGMENTS_FILE, Scratch
from inference_service.vllm.server import VllmProcess, supervise
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

STAND_IN = """
import http.server, multiprocessing.shared_memory, pathlib, signal, subprocess, sys, tempfile, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
if sys.argv[2] in ("deaf", "loses its engine"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "litters":
    tempfile.mkstemp()
    segment = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
    pathlib.Path(sys.argv[1]).with_suffix(".segment").write_text(segment.name)
started = pathlib.Path(sys.argv[1])
started.with_suffix(".part").write_text(str(worker.pid))
started.with_suffix(".part").rename(started)
if sys.argv[2] == "dies":
    sys.exit(7)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler)
if sys.argv[2] == "loses its engine":
    server.handle_request()
    # As vLLM does while a request waits for the engine.
    server.server_close()
    time.sleep(300)
server.serve_forever()
"""

SUPERVISOR = """
import logging, os, signal, sys
from inference_service.registration import Registration
from inference_service.vllm.command import Command
from inference_service.vllm.scratch import Scratch
from inference_service.vllm.server import supervise

logging.basicConfig(level=logging.INFO)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
url, fleet_url, *argv = sys.argv[1:]
registration = Registration(fleet_url, url, "stand-in") if fleet_url else None
with Scratch(os.environ) as scratch:
    command = Command(tuple(argv), {**os.environ, "TMPDIR": str(scratch.path)})
    supervise(command, url, registration, scratch)
"""


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Is there once the stand-in has started its worker, and holds that one's process id."""
    return tmp_path / "started"


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    with Scratch({"TMPDIR": str(tmp_path)}) as scratch:
        yield scratch


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def command(started: Path, port: int) -> Callable[[str], Command]:
    return lambda how: Command((sys.executable, "-c", STAND_IN, str(started), how, str(port)), os.environ)


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> object:
    """The supervisor ignores further signals while it ends its child; this process goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("how", ["obeys", "deaf"])
def test_leaving_the_context_ends_the_server_and_its_worker(
    how: str, command: Callable[[str], Command], started: Path, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_service.vllm.server.GRACE_S", 0.5)
    with VllmProcess(command(how), scratch) as vllm:
        vllm.wait_until(started.exists)
        worker = psutil.Process(int(started.read_text()))
        (server,) = worker.parents()[:1]
    assert_gone([server, worker])


def test_a_server_that_ends_by_itself_is_an_error_and_leaves_no_worker(
    command: Callable[[str], Command], started: Path, scratch: Scratch
) -> None:
    with pytest.raises(ProcessFailed, match="exit code 7"), VllmProcess(command("dies"), scratch) as vllm:
        wait_for(started.exists)
        worker = psutil.Process(int(started.read_text()))
        vllm.wait_until(lambda: False)
    assert_gone([worker])


def test_a_server_that_closes_its_listener_and_hangs_is_killed_soon(
    command: Callable[[str], Command], started: Path, port: int, scratch: Scratch
) -> None:
    begun_s = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"lost its engine \(it takes no more connections: Connection refused\)"):
        supervise(command("loses its engine"), f"http://127.0.0.1:{port}", None, scratch)
    # Far less than the 150 s for which vLLM was seen to hang, and than SIGTERM and its grace would take on top.
    assert time.monotonic() - begun_s < 30
    worker = int(started.read_text())
    wait_for(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names in /dev/shm on Linux only")
def test_what_a_killed_vllm_leaves_is_removed_by_the_next_start_and_its_own_at_its_end(
    command: Callable[[str], Command], started: Path, port: int
) -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    arguments = [sys.executable, "-c", SUPERVISOR, f"http://127.0.0.1:{port}", "", *command("litters").argv]
    env = {**os.environ, "TMPDIR": str(place)}
    first = subprocess.Popen(arguments, env=env)
    wait_for(lambda: started.exists() and any(place.glob(f"{PREFIX}*/{SEGMENTS_FILE}")))
    segment = Path("/dev/shm") / started.with_suffix(".segment").read_text()
    family = psutil.Process(first.pid).children(recursive=True)
    # At once, as none may see the end of another: the server would end in order, and the tracker remove its segments.
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    first.kill()
    first.wait()
    assert_gone(family)
    (left,) = place.iterdir()
    assert len(list(left.iterdir())) == 2 and segment.exists()
    started.unlink()
    second = subprocess.Popen(arguments, env=env)
    wait_for(started.exists)
    assert not left.exists() and not segment.exists()
    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0
    assert list(place.iterdir()) == []
    assert not (Path("/dev/shm") / started.with_suffix(".segment").read_text()).exists()
    place.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_killed_supervisor_takes_the_server_with_it(command: Callable[[str], Command], started: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, "http://127.0.0.1:1", "", *command("obeys").argv])
    wait_for(started.exists)
    (server,) = psutil.Process(supervisor.pid).children()
    supervisor.kill()
    supervisor.wait()
    assert_gone([server])
    # The stand-in does not end its worker, as vLLM does.
    psutil.Process(int(started.read_text())).kill()


@pytest.fixture
def pool() -> Iterator[tuple[InferencePool, str]]:
    """A trainer's pool, and the URL of its fleet endpoint."""
    config = PoolSection(instances=("dns:nowhere.invalid:1",))
    loop = EventLoopThread()
    pool = InferencePool(config)
    server = FleetServer(pool, config)
    loop.run(server.start())
    yield pool, server.url
    loop.run(server.stop())
    loop.run(pool.close())
    loop.close()


@pytest.mark.parametrize("who", ["a signal", "the fleet"])
def test_a_server_leaves_its_fleet_before_it_ends(
    who: str, command: Callable[[str], Command], started: Path, port: int, pool: tuple[InferencePool, str]
) -> None:
    fleet, fleet_url = pool
    url = f"http://127.0.0.1:{port}"
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, url, fleet_url, *command("obeys").argv])
    wait_for(lambda: bool(fleet.members))
    (member,) = fleet.members
    assert (member.name, member.url) == ("stand-in", url)
    worker = psutil.Process(int(started.read_text()))
    if who == "a signal":
        supervisor.send_signal(signal.SIGTERM)
        wait_for(lambda: member.state == "draining")
        assert supervisor.poll() is None and worker.is_running(), "it goes on answering until it may leave"
    fleet.remove("stand-in")
    assert supervisor.wait(30) == 0
    assert_gone([worker])
