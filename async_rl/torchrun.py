"""`python -m async_rl.torchrun OPTIONS -m MODULE ...`: torchrun, with `--shutdown-timeout` in older torch, too.

Releases without that option (2.11 is one) kill ranks 30 s after they asked them to end, which is too early for a
checkpoint.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

OPTION = "--shutdown-timeout"


def main(argv: list[str]) -> None:
    """As torchrun's own; `argv` are its words, `--shutdown-timeout SECONDS` before `-m` among them."""
    known = {word for action in run.get_args_parser()._actions for word in action.option_strings}
    if OPTION in argv and OPTION not in known:
        at = argv.index(OPTION)
        # The defaults of `death_sig` and `timeout`, which the agent leaves to it.
        PContext.close.__defaults__ = (None, int(argv[at + 1]))
        argv = [*argv[:at], *argv[at + 2 :]]
    run.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
