"""`torchrun -m async_rl.trainer CONFIG [--section.key VALUE ...]`: one rank of the training pool.

A producer that is lost is started again (`recovery.py`). A run that ends early, by another fault of the run or by
SIGTERM, saves its last complete iteration first; a second SIGTERM ends it at once.

Exit codes: 0 trained to the end, 1 a fault that may pass with a restart, 2 bad input found before any training, 4 a
fault that no restart mends, 5 fenced: another trainer has taken over the run, 143 ended by SIGTERM. torchrun itself
exits with 1 whatever its ranks' codes are, and names them in its log.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from async_rl.checks.preflight import require_sound
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, Fenced, RunStopped
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.programs.extras import require_extras
from async_rl.shared.programs.failure_report import VARIABLE, report_failure, report_unnamed_failure
from async_rl.shared.programs.loading import loading
from async_rl.shared.programs.start_gate import wait_at_gate
from trainer.process_end import end_now, end_with_torchrun, exit_code_of
from trainer.stop_signal import StopSignal

if TYPE_CHECKING:
    from trainer.parallel import Parallel
    from trainer.session import Session
    from trainer.shutdown import Shutdown

log = logging.getLogger("trainer")

Work = Callable[[Config, StopSignal], None]
"""(config, what tells this rank to end): what a rank does."""


def main(arguments: list[str], work: Work | None = None) -> int:
    """Reads the config and does `work`, by default `run`; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    end_with_torchrun()
    stop = StopSignal(_report_stop)
    stop.install()
    parser = make_parser()
    config_path = parser.parse_args(arguments).config
    logs = None
    try:
        config = load_config(config_path, parser.overrides)
        logs = config.run.dir / "logs"
        require_extras("the trainer", "trainer", *config.tracking.extras)
        # `async-rl run` has already checked; of the ranks that a user's torchrun started, one check is enough.
        if VARIABLE not in os.environ and os.environ.get("RANK", "0") == "0":
            num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
            require_sound(config, trains=True, serves=False, num_ranks=num_ranks)
        (work or run)(config, stop)
    except RunStopped as error:
        report_failure(error, os.environ)
        log.error("RunStopped: %s", error)
        return exit_code_of(error)
    except AsyncRLError as error:
        report_failure(error, os.environ)
        _say(error, logs)
        return exit_code_of(error)
    except SystemExit as end:
        if not end.code:
            # A code of 0 would count as a run that trained to its end.
            raise RuntimeError("sys.exit() was called while training, by an algorithm of your own: remove it") from end
        raise
    return 0


def _report_stop() -> None:
    """Reports that this rank was told to end while it has nothing to save: it would count as a fault otherwise."""
    rank = os.environ.get("RANK", "0")
    report_failure(RunStopped(f"training rank {rank} was told to end (SIGTERM) outside of training"), os.environ)


def _say(error: AsyncRLError, logs: Path | None) -> None:
    """Logs the named error; the traceback is logged too if standard error is a log file, else written to `logs`."""
    kind = type(error).__name__
    if isinstance(error, ConfigError):
        log.error("%s: %s", kind, error)
    elif VARIABLE in os.environ or logs is None or not logs.parent.is_dir():
        log.error("%s: %s", kind, error, exc_info=error)
    else:
        logs.mkdir(exist_ok=True)
        file = logs / f"rank-{os.environ.get('RANK', '0')}.traceback"
        file.write_text("".join(traceback.format_exception(error)))
        log.error("%s: %s\nits traceback is in %s", kind, error, file)


def make_parser() -> Parser:
    parser = Parser(
        "torchrun -m async_rl.trainer",
        "Trains a config with the instances that it names (pool.instances) or that register themselves.",
        "CONFIG [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    return parser


def run(config: Config, stop: StopSignal) -> None:
    """Trains to the end and saves the model to `run.dir`/model."""
    with training_ranks(config, stop) as (parallel, shutdown):
        # See `training_ranks`.
        with loading(), stop.loading():
            from async_rl.shared.cpu.model_scan import scan_models_once

            scan_models_once()
            from async_rl.loop import train
            from trainer.session import open_session

        # All before it leaves the run's directory as it is: the instances may still turn out not to start.
        wait_at_gate(os.environ)
        with open_session(config, parallel, shutdown) as session:

            def train_from(iteration: int) -> None:
                train(
                    session.train,
                    session.rank,
                    session.prompts,
                    session.rollouts,
                    session.ledger,
                    session.recorder,
                    iteration,
                    session.saving.after_iteration,
                )
                # A rank that has failed after the last step is not at work on the model's files.
                shutdown.synchronize(may_stop=False)

            with shutdown.saving(session.saving.save_last):
                session.recovery.train(train_from)
            session.megatron.save_hf(config.run.dir / "model")
            if config.evaluation.sets:
                _evaluate_trained(config, session, shutdown)


def _evaluate_trained(config: Config, session: "Session", shutdown: "Shutdown") -> None:
    """Evaluates the weights after the last step, which no iteration publishes. They are saved: what fails is logged.

    Raises:
        RunStopped, Fenced: as anywhere in a run.
    """
    try:
        session.evaluate_trained(session.rank.publish_weights().version)
    except (RunStopped, Fenced):
        raise
    except AsyncRLError as error:
        log.error(
            "the trained weights are not evaluated: %s: %s; async-rl eval does so for %s",
            type(error).__name__,
            error,
            config.run.dir / "model",
        )
    # The other ranks stay until the main rank has evaluated.
    shutdown.synchronize(may_stop=False)


@contextmanager
def training_ranks(config: Config, stop: StopSignal) -> "Iterator[tuple[Parallel, Shutdown]]":
    """Joins the other ranks, and leaves them at exit."""
    # Imported after the config was validated, so that a typo is reported without loading torch and Megatron.
    with loading(), stop.loading():
        from trainer.devices import choose_device

        device = choose_device(config.trainer.device, config.train.exact)
        # On an NPU, MindSpeed must be loaded before Megatron.
        from trainer.lifeline import Lifeline
        from trainer.parallel import init_parallel
        from trainer.shutdown import Shutdown

    parallel = init_parallel(device, config.run.seed, config.trainer)
    lifeline = Lifeline(parallel, config.trainer.lost_after_s, end_now)
    shutdown = Shutdown(parallel, stop, config.checkpoint.grace_s)
    try:
        yield parallel, shutdown
    finally:
        lifeline.close()
        parallel.close()
        shutdown.close()


def run_process(arguments: list[str], work: Work | None = None) -> NoReturn:
    """Runs `main` and ends this process without joining threads; everything that needs closing is closed by then."""
    try:
        code: object = main(arguments, work)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        report_unnamed_failure(os.environ)
        # As the interpreter does at exit, but without joining threads first.
        log.critical("%s: %s", type(error).__name__, error, exc_info=error)
        code = 1
    logging.shutdown()
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    run_process(sys.argv[1:])
