"""One rank that watches the others: `torchrun -m tests.support.trainer.lifeline_worker DIR LOST_AFTER_S MODE`.

It writes its process number to DIR/rank-N.pid. Then it `waits` in a collective that rank 1 never enters, or `ends`
after a few seconds, or `ends apart`: rank 1 comes late to a collective, and each rank exits later than the one before.
"""

import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config.trainer_section import TrainerSection
from trainer.devices import choose_device
from trainer.lifeline import Lifeline
from trainer.parallel import init_parallel
from trainer.process_end import end_now


def main() -> None:
    directory, lost_after_s, mode = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    lifeline = Lifeline(parallel, lost_after_s, end_now)
    (directory / f"rank-{parallel.rank}.pid").write_text(str(os.getpid()))
    if mode == "waits":
        if parallel.rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.zeros(1))
    elif mode == "ends":
        time.sleep(4.0)
    elif parallel.rank == 1:
        time.sleep(2 * lost_after_s)
    dist.all_reduce(torch.zeros(1))
    lifeline.close()
    if mode == "ends apart":
        time.sleep(parallel.rank * 1.5 * lost_after_s)
    parallel.close()


if __name__ == "__main__":
    code = 0
    try:
        main()
    except Exception:
        # The collective, whose other ranks have just ended.
        logging.exception("rank failed")
        code = 1
    # As the trainer ends: the interpreter would wait for threads of a group that has a stopped member.
    logging.shutdown()
    os._exit(code)
