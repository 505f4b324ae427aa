"""`python -m async_rl.shared.programs.start MODULE ARGUMENTS`: as `python -m MODULE`; for `cli` and `trainer`.

Ctrl-C while the module's imports go on ends the process silently, as it ends any other program; Python would print a
traceback of an import. From when the arguments are parsed it is a KeyboardInterrupt (`command_line.Parser`).

Where nobody reads the output any more, as `head` that has its lines, the process ends silently, too.
"""

# Only what Python itself has loaded by now: the working directory may have modules of any name.
import os
import runpy
import sys
from collections.abc import Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
"""Where our packages are, installed or in a checkout."""

STDOUT = 1


def run(module: str, arguments: Sequence[str]) -> None:
    """Runs the module as the main program."""
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def leave_out_working_directory() -> None:
    """Removes the working directory from the head of the search path, where `python -m` puts it, unless it is `ROOT`.

    PYTHONPATH stays as it is. A user's files are loaded by their paths, with what they import from beside them.
    """
    is_left_out = sys.flags.safe_path or "PYTHONSAFEPATH" in os.environ
    if not is_left_out and sys.path[:1] == [os.getcwd()] and not os.path.samefile(os.getcwd(), ROOT):
        del sys.path[0]


if __name__ == "__main__":
    import select
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        try:
            run(sys.argv[1], sys.argv[2:])
        finally:
            # There may be no output at all.
            print(end="", flush=True)
    except BrokenPipeError:
        output = select.poll()
        output.register(STDOUT, 0)
        if output.poll(0) != [(STDOUT, select.POLLERR)]:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        sys.exit(128 + signal.SIGPIPE)
