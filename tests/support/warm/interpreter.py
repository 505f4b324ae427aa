"""`python -m tests.support.warm.interpreter DESCRIPTOR`: imports what programs need, and forks for whoever asks.

It answers the process that started it, over the socket DESCRIPTOR, until that closes it, and makes children of that
process rather than of its own.
"""

import atexit
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tests.support.warm.client import LENGTH, PADDING, PID, WarmStarts
from tests.support.warm.clone import fork_sibling, set_command_line
from tests.support.warm.start import STARTED, Start, become, prepare_interpreter

NAME = "warm-interpreter"

MODULES = (
    "torch.distributed.run",
    "transformers",
    "async_rl.loop",
    "async_rl.producer.program",
    "inference_service.server",
    "trainer.session",
)


def import_everything() -> None:
    """What ranks and instances import, and no more: nothing is computed, no device opened, no thread started."""
    gc.disable()
    # First: it decides how the others load Megatron.
    importlib.import_module("trainer.devices.cpu").load_megatron()
    for name in MODULES:
        importlib.import_module(name)
    _leave_nothing_to_do_at_exit()
    _name_methods_at_once()
    gc.freeze()
    gc.enable()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"a fork would have one of {len(threads)} threads"


def _leave_nothing_to_do_at_exit() -> None:
    """What imports registered: to take torch's operators apart one by one, and to report the compiler's times."""
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False
    dynamo = sys.modules["torch._dynamo.utils"]
    atexit.unregister(dynamo.dump_compile_times)


def _name_methods_at_once() -> None:
    """torchrun's rendezvous names its caller some thirty times, for events that nobody reads, and goes through all
    modules each time: two seconds with as many as are imported here."""
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]


def serve(connection: socket.socket) -> tuple[Start, list[int]]:
    """Forks for each request; returns in the forks, with what they are to become. Ends when the asker has gone."""
    with connection:
        while True:
            length, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 4)
            if len(length) < LENGTH.size:
                os._exit(0)
            text = connection.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL)
            start = Start.from_json(text)
            if (pid := fork_sibling()) == 0:
                return start, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(PID.pack(pid))


def wait_quietly() -> None:
    """An interpreter that waits holds nobody's streams, and signals to a group are not meant for it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2, STARTED):
        os.dup2(nothing, number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_command_line([NAME])


def main() -> NoReturn:
    path = sys.path[1:]
    warm = dict(os.environ)
    import_everything()
    set_by_imports = {name: value for name, value in os.environ.items() if name not in warm}
    connection = socket.socket(fileno=int(sys.argv[1]))
    wait_quietly()
    start, descriptors = serve(connection)
    while True:
        become(start, descriptors, set_by_imports)
        if not start.starts_others:
            break
        mine, its = socket.socketpair()
        if os.fork() != 0:
            its.close()
            WarmStarts(mine, warm).install()
            break
        mine.close()
        wait_quietly()
        start, descriptors = serve(its)
    # Not before: an interpreter of its own is not taken for another of these programs.
    set_command_line(start.command)
    prepare_interpreter(start, path)
    os.close(STARTED)
    run(start.module, start.script)


def run(module: str, script: str | None) -> NoReturn:
    """Runs a program to its end, as Python does, but for the removal of its modules, which would touch all memory."""
    code: object = 0
    # What runs as the main program is not one of the imported modules.
    sys.modules.pop(f"{module}.__main__", None)
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)
    try:
        if script is None:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    assert sys.argv[2:] == [PADDING]
    main()
