"""`torchrun -m trainer CONFIG [--section.key VALUE ...]`: one rank of the training pool.

Exit codes: 0 trained to the end, 1 a fault of the run, 2 bad input found before any training.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError, ConfigError

USAGE = "usage: torchrun -m trainer CONFIG [--section.key VALUE ...]"
log = logging.getLogger("trainer")


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _end)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        run(load_config(Path(arguments[0]), arguments[1:]), os.environ.get("ASYNC_RL_TOKEN"))
    except ConfigError as error:
        log.error("ConfigError: %s", error)
        return 2
    except AsyncRLError as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=error)
        return 1
    return 0


def run(config: Config, token: str | None) -> None:
    """Trains to the end and saves the model to `run.dir`/model."""
    # After the config was found good, so that a typo does not wait for torch and Megatron to load.
    from async_rl.loop import train
    from trainer.devices import choose_device

    device = choose_device(config.trainer.device)
    # On an NPU, MindSpeed has to be loaded before Megatron is.
    from trainer.parallel import init_parallel
    from trainer.session import open_session

    parallel = init_parallel(device, config.run.seed, config.trainer)
    try:
        with open_session(config, parallel, token) as session:
            train(
                config.train,
                session.replica,
                session.prompts,
                session.rollouts,
                session.ledger,
                session.recorder,
                session.progress.first_iteration,
                session.progress.after_iteration,
            )
            session.megatron.save_hf(config.run.dir / "model")
    finally:
        parallel.close()


def _end(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as an exception, so that everything it opened is closed."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
