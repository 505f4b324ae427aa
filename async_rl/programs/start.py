"""`python -m async_rl.programs.start MODULE ARGUMENTS`: as `python -m MODULE`; for `async_rl.cli`.

Ctrl-C while the module's imports go on ends the process silently, as it ends any other program; Python would print a
traceback of an import. From when the arguments are parsed it is a KeyboardInterrupt (`command_line.Parser`).
"""

import runpy
import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
