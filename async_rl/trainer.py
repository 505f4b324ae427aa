"""`torchrun -m async_rl.trainer CONFIG [--section.key VALUE ...]`: one training rank, see `trainer.__main__`.

torchrun starts ranks with the working directory first on Python's search path, where it would find a `trainer.py` of
the user in place of the installed package. By this name the rank is the same whatever the directory holds.
"""

import os
import sys

from async_rl.shared.programs.start import leave_out_working_directory, run

if __name__ == "__main__":
    leave_out_working_directory()
    # For all that the rank starts, such as the processes of rewards.
    os.environ["PYTHONSAFEPATH"] = "1"
    run("trainer", sys.argv[1:])
