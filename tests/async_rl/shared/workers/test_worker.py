"""Every way in which what a worker runs can misbehave, in turn and at once: a named error in time, no harm done."""

import asyncio
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.workers import process
from async_rl.shared.workers import worker as worker_module
from async_rl.shared.workers.child import Pipe, messages
from async_rl.shared.workers.process import LENGTH, Mark
from async_rl.shared.workers.worker import CallCrashed, CallFailed, CallInterrupted, LoadingEnded, NotLoaded, Worker
from tests.support.code_worker import KINDS
from tests.support.open_files import room_for_files

pytestmark = pytest.mark.distributed

MODULE = "tests.support.code_worker"
START_S = 240.0
GRACE_S = 1.0
IN_TIME_S = 60.0
"""What comes by itself, or by a time limit, does so at once; a machine under load starts processes slowly."""

FINE = "pass"
SLEEPS = "await asyncio.sleep(3600)"
BLOCKS = "time.sleep(3600)"
SPINS = "while True: pass"
HOLDS = "re.match('(a+)+$', 'a' * 64 + 'b')"
"""It does not let the interpreter go."""
SWALLOWS = """
while True:
    try: await asyncio.sleep(3600)
    except asyncio.CancelledError: pass
"""


class Rig:
    """One worker of a kind for all tests: each call meets what those before it left."""

    def __init__(self, loop: EventLoopThread, kind: str) -> None:
        self.loop = loop
        self.worker = Worker(kind, MODULE, kind, max_left_behind_s=0.5)

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Awaits a coroutine beside the worker, which runs."""

        async def running() -> Any:
            if not self.worker.running:
                await self.worker.start(START_S)
            return await asyncio.wait_for(make(), IN_TIME_S)

        return self.loop.run(running(), START_S + IN_TIME_S)

    async def call(self, code: str, timeout_s: float = IN_TIME_S, receive: Any = lambda *values: None) -> Any:
        """The result of a call, or its exception; a text of one that had to be ended."""
        try:
            with self.worker.call(code, GRACE_S, receive) as call:
                await call.wait(timeout_s)
                return call.ended.result() if call.ended.done() else await call.end()
        except Exception as error:
            return error

    async def begun(self, code: str) -> "asyncio.Task[Any]":
        """A call that is under way."""
        task = asyncio.create_task(self.call(code))
        await asyncio.sleep(0.3)
        return task

    def __call__(self, code: str, timeout_s: float = IN_TIME_S) -> Any:
        return self.run(lambda: self.call(code, timeout_s))

    @property
    def pid(self) -> int:
        assert self.worker.process is not None
        return self.worker.process.pid


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[str, Rig]]:
    loop = EventLoopThread()
    rigs = {kind: Rig(loop, kind) for kind in KINDS}
    yield rigs
    for rig in rigs.values():
        loop.run(rig.worker.close(), IN_TIME_S)
    loop.close()


@pytest.fixture(params=KINDS)
def rig(rigs: dict[str, Rig], request: pytest.FixtureRequest) -> Rig:
    return rigs[request.param]


@pytest.fixture
def at_once(rigs: dict[str, Rig]) -> Rig:
    return rigs["at once"]


RAISES = {
    "raise KeyError('no such column')": "the_code.*no such column",
    "raise KeyError('x' * 10**6)": r"x\n\[...\]\nx",
    "sys.exit(3)": "SystemExit: 3",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise asyncio.CancelledError": "CancelledError",
    "result = object()": "not JSON serializable",
}
RAISES_AT_ONCE = {
    "asyncio.current_task().cancel()\nawait asyncio.sleep(1)": "CancelledError",
    "async def end(): sys.exit(3)\nawait asyncio.create_task(end())": r"SystemExit\(3\) in a task",
}


def check_raises(rig: Rig, code: str, message: str) -> None:
    assert rig(FINE) == "fine"
    pid = rig.pid
    failed = rig(code)
    assert isinstance(failed, CallFailed) and re.search(message, str(failed), re.DOTALL), failed
    assert len(str(failed)) < 30_000 and rig(FINE) == "fine" and rig.pid == pid


@pytest.mark.parametrize(("code", "message"), RAISES.items())
def test_whatever_a_call_raises_is_its_result(rig: Rig, code: str, message: str) -> None:
    check_raises(rig, code, message)


@pytest.mark.parametrize(("code", "message"), RAISES_AT_ONCE.items())
def test_whatever_a_call_on_a_loop_raises_is_its_result(at_once: Rig, code: str, message: str) -> None:
    check_raises(at_once, code, message)


@pytest.mark.parametrize(
    ("code", "message"),
    {
        "os._exit(7)": r"its process ended \(exit code 7\) while it ran",
        "ctypes.string_at(0)": r"exit code -11\) while it ran",
        "sys.setrecursionlimit(10**5)\nfor _ in range(5000): left = [left]\nchannel.say(left)\ntime.sleep(3600)": (
            r"wrote into the trainer's pipe \(.*while it ran"
        ),
        # It ends by itself, unless the thread that reads its closed input is not woken by that.
        "os.closerange(0, 64)\ntime.sleep(3600)": (
            r"exit code (0|unknown: it closed its output and was killed)\) while it ran"
        ),
    }.items(),
)
def test_a_crash_is_that_of_its_call_alone(rig: Rig, code: str, message: str) -> None:
    async def go() -> tuple[Any, Any]:
        beside = await rig.begun(SLEEPS) if rig.worker.name == "at once" else None
        return await rig.call(code), beside and await beside

    failed, beside = rig.run(go)
    assert isinstance(failed, CallCrashed) and re.search(message, str(failed)), failed
    assert beside is None or isinstance(beside, CallInterrupted)
    assert rig(FINE) == "fine"


@pytest.mark.parametrize(
    ("code", "message"),
    {
        BLOCKS: "^its process was killed; it was at:\n  File .*the_code",
        SPINS: "^its process was killed; it was at:\n  File .*the_code",
        HOLDS: "^its process was killed; it does not let the interpreter go$",
    }.items(),
)
def test_a_call_that_hangs_is_ended_and_says_where_it_was(
    rig: Rig, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == HOLDS:
        monkeypatch.setattr(worker_module, "SILENT_CPU_S", 0.5)
    assert re.search(message, rig(code, 0.5), re.DOTALL)
    assert rig(FINE) == "fine"


@pytest.mark.parametrize(
    ("code", "message"), {SLEEPS: "^it was stopped:.*the_code.*CancelledError", SWALLOWS: "^its process was k"}.items()
)
def test_a_call_on_a_loop_is_cancelled_first(at_once: Rig, code: str, message: str) -> None:
    assert re.search(message, at_once(code, 0.5), re.DOTALL)


def test_a_call_says_where_it_is_however_late_its_process_comes_to_say_so(rig: Rig) -> None:
    """As on a busy machine, here because it is stopped for a while."""

    async def go() -> Any:
        spinning = psutil.Process(rig.pid)
        before_s = spinning.cpu_times().user
        calling = asyncio.create_task(rig.call(SPINS, 3.0))
        while spinning.cpu_times().user < before_s + 0.1:
            await asyncio.sleep(0.01)
        spinning.suspend()
        await asyncio.sleep(4.5)
        assert not calling.done()
        spinning.resume()
        return await calling

    assert re.search("it was at:\n.*the_code", rig.run(go), re.DOTALL)


def test_a_process_that_writes_into_its_pipes_is_ended(rig: Rig) -> None:
    code = "for fd in range(3, 20):\n try: os.write(fd, b'x' * 64)\n except OSError: pass\ntime.sleep(3600)"
    ended = rig(code, 3.0)
    assert isinstance(ended, CallCrashed) or "its process was killed" in ended
    assert rig(FINE) == "fine"


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(200): print('x' * 10_000)\nsys.stdout.flush()",
        "threading.Thread(target=time.sleep, args=(3600,)).start()",
        "if os.fork(): time.sleep(0.2)\nelse: result = 'twice'",
        "assert sys.stdin.read() == '' == subprocess.run(['cat'], capture_output=True, text=True).stdout",
    ],
)
def test_these_do_no_harm_at_all(rig: Rig, code: str) -> None:
    assert rig(FINE) == "fine"
    pid = rig.pid
    assert (rig(code), rig(FINE), rig.pid) == ("fine", "fine", pid)


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.get_running_loop().stop()\nawait asyncio.sleep(0.1)",
        "asyncio.get_running_loop().call_soon(sys.exit, 3)\nawait asyncio.sleep(0.1)",
        "left += [asyncio.create_task(asyncio.sleep(3600)) for _ in range(100)]",
    ],
)
def test_these_do_no_harm_to_a_loop(at_once: Rig, code: str) -> None:
    test_these_do_no_harm_at_all(at_once, code)


def test_what_a_call_prints_is_no_answer_and_ctrl_c_is_left_to_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    loop = EventLoopThread()
    rig = Rig(loop, "in turn")
    assert rig("print('said by Python', flush=True)\nos.write(1, b'said to the descriptor')") == "fine"
    assert "said by Python\nsaid to the descriptor" in capfd.readouterr().err
    os.killpg(rig.pid, signal.SIGINT)
    assert rig(FINE) == "fine" and rig.worker.traits == rig.pid
    loop.run(rig.worker.close())
    loop.close()


@pytest.mark.parametrize(("kind", "code"), [("in turn", BLOCKS), ("at once", SWALLOWS), ("at once", SLEEPS)])
def test_a_call_that_is_left_is_ended_and_the_next_is_made(rigs: dict[str, Rig], kind: str, code: str) -> None:
    async def go() -> Any:
        (await rigs[kind].begun(code)).cancel()
        while isinstance(result := await rigs[kind].call(FINE), CallInterrupted):
            await rigs[kind].worker.start(START_S)
        await rigs[kind].worker.close()
        return result

    assert rigs[kind].run(go) == "fine"


def test_time_in_which_another_call_blocks_the_process_does_not_count(at_once: Rig) -> None:
    """So the one that blocks is ended first, though its time limit is the later one."""

    async def go() -> list[Any]:
        return await asyncio.gather(at_once.call(SLEEPS, 2.0), at_once.call(BLOCKS, 2.3))

    beside, blocking = at_once.run(go)
    assert isinstance(beside, CallInterrupted) and "its process was killed" in blocking


def test_what_a_call_leaves_behind_and_blocks_ends_the_process_and_not_the_calls(at_once: Rig) -> None:
    code = f"async def block():\n await asyncio.sleep(0)\n {BLOCKS}\nleft.append(asyncio.create_task(block()))"

    async def go() -> tuple[Any, Any]:
        beside = await at_once.begun(SLEEPS)
        ended = await at_once.call(code)
        # It blocks unless it was cancelled before.
        await asyncio.wait({beside}, timeout=3)
        await at_once.worker.close()
        return ended, await beside

    ended, beside = at_once.run(go)
    assert ended == "fine" and isinstance(beside, CallInterrupted)


@pytest.mark.parametrize("end", ["os._exit(7)", BLOCKS])
def test_a_process_that_ends_or_is_killed_takes_along_what_it_started(rig: Rig, end: str) -> None:
    """The child ignores SIGTERM, and holds the worker's output, so that the end of the worker is not seen there."""
    child = f"if not child: signal.signal(signal.SIGTERM, signal.SIG_IGN); {BLOCKS}"
    left: list[int] = []
    ended = rig.run(lambda: rig.call(f"child = os.fork()\n{child}\nchannel.say(child)\n{end}", 3.0, left.append))
    assert isinstance(ended, CallCrashed) or "its process was killed" in ended
    children = [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]
    assert len(left) == 1 and psutil.wait_procs(children, timeout=IN_TIME_S)[1] == []


def test_a_process_that_closes_its_output_and_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_TIMEOUT_S", 0.1)

    async def go() -> tuple[int | str, int | None]:
        running = await asyncio.create_subprocess_exec("sleep", "3600", start_new_session=True)
        code = await process.exit_code(running)
        await process.reap(running)
        return code, running.returncode

    assert asyncio.run(go()) == ("unknown: it closed its output and was killed", -signal.SIGKILL)


@pytest.mark.parametrize(("kind", "code"), [("in turn", BLOCKS), ("at once", SWALLOWS)])
def test_close_ends_whatever_is_under_way(rigs: dict[str, Rig], kind: str, code: str) -> None:
    rig = rigs[kind]

    async def go() -> tuple[int, Any]:
        calling, pid = await rig.begun(code), rig.pid
        await rig.worker.close()
        return pid, await calling

    pid, ended = rig.run(go)
    assert isinstance(ended, CallInterrupted) and not rig.worker.running and not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("os._exit(4)", "its process ended with exit code 4"), ("raise KeyError('top')", "^KeyError: 'top'$")],
)
def test_what_cannot_be_loaded_says_why(loop: EventLoopThread, kind: str, message: str) -> None:
    worker = Worker(kind, MODULE, kind)
    with pytest.raises(NotLoaded, match=message) as caught:
        loop.run(worker.start(START_S))
    assert isinstance(caught.value, LoadingEnded) == ("exit" in kind) and not worker.running


def test_a_process_that_cannot_be_started_says_why(loop: EventLoopThread) -> None:
    worker = Worker("", MODULE, "in turn")
    too_many = r"cannot be started: .*Too many open files.*; raise .*ulimit -n"
    with room_for_files(0), pytest.raises(LoadingEnded, match=too_many):
        loop.run(worker.start(START_S))
    assert not worker.running


@pytest.mark.parametrize("is_amid_a_call", [False, True])
def test_a_process_whose_parent_dies_amid_a_message_or_a_call_ends(tmp_path: Path, is_amid_a_call: bool) -> None:
    mark = tmp_path / "mark"
    mark.write_bytes(bytes(Mark.SIZE_BYTES))
    command = [sys.executable, "-m", MODULE, "in turn", str(mark)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        assert worker.stdout.read(LENGTH.size), "it has loaded"
        frame = pickle.dumps(("begin", 1, BLOCKS))
        worker.stdin.write(LENGTH.pack(len(frame)) + frame[: None if is_amid_a_call else 9])
        worker.stdin.flush()
        while is_amid_a_call and not any(mark.read_bytes()):
            pass
        worker.stdin.close()
        assert worker.wait(IN_TIME_S) == 0


def test_messages_end_where_the_parent_was_killed_amid_one() -> None:
    texts = [pickle.dumps(value) for value in ("one", "x" * 500)]
    data = b"".join(LENGTH.pack(len(text)) + text for text in texts)
    whole = LENGTH.size + len(texts[0])
    for cut in range(len(data)):
        assert list(messages(io.BytesIO(data[:cut]))) == (["one"] if cut >= whole else [])
    assert list(messages(io.BytesIO(data))) == ["one", "x" * 500]


def test_frames_of_many_threads_do_not_mix() -> None:
    file = io.BytesIO()
    pipe = Pipe(file)

    def send(who: int) -> None:
        for length in range(200):
            pipe.send(*[who] * length)

    threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.seek(0)
    frames = [file.read(*LENGTH.unpack(header)) for header in iter(lambda: file.read(LENGTH.size), b"")]
    assert len(frames) == 800 and all(len(set(re.findall(rb"\d", frame))) <= 1 for frame in frames)
