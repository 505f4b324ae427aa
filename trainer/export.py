"""`async-rl export RUN --to DIR`: a checkpoint's policy as a Hugging Face checkpoint, which transformers and vLLM load,
or its adapters as peft has them, with a model card; or adapters that peft has saved, merged into their base.

One process reads it, whatever layout it was saved under. Exit codes: 0 written, 1 it cannot be written, 2 bad input.
"""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from async_rl.checks.forecast.rank_parameters import WEIGHT_BYTES
from async_rl.config.file import parse_config
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError, WriteFailed
from async_rl.records.run_records import require_readable
from async_rl.shared.checkpoint_names import MANIFEST, checkpoints_dir, newest_checkpoint, whole_checkpoints
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.programs.error_text import error_text
from async_rl.shared.programs.extras import require_extras
from async_rl.shared.programs.failure_report import report_failure
from async_rl.shared.protocol.adapter import CONFIG_FILE

log = logging.getLogger("export")


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    options = make_parser().parse_args(arguments)
    source: Path = options.run
    try:
        require_extras("async-rl export", "trainer")
        if (source / CONFIG_FILE).is_file():
            require_for_adapters(options)
            require_empty(options.to)
            merge(source, options.to, options.model, options.dtype)
        else:
            require_for_run(options)
            require_empty(options.to)
            source = export_run(options)
    except (ConfigError, WriteFailed) as error:
        report_failure(error, os.environ)
        log.error("%s: %s", type(error).__name__, error_text(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        log.error("interrupted: nothing was written to %s", options.to)
        return 128 + signal.SIGINT
    log.info("wrote the policy of %s to %s", source, options.to)
    return 0


def make_parser() -> Parser:
    parser = Parser(
        "async-rl export",
        "Writes a checkpoint's policy as a Hugging Face checkpoint, which transformers and vLLM load, or its adapters, "
        "as peft has them; or adapters that peft has saved, merged into their base.",
        "RUN --to DIR [--iteration N] [--model MODEL] [--merge] [--dtype DTYPE]",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="the run's directory (run.dir), one of its checkpoints, or a directory with adapters that peft has saved",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write; new or empty")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="where the run's model.path, or the adapters' base, is now, if it was moved or is relative",
    )
    parser.add_argument("--iteration", type=int, metavar="N", help="the checkpoint iteration-N, not the newest")
    parser.add_argument("--merge", action="store_true", help="the whole model, adapters merged into its weights")
    parser.add_argument(
        "--dtype",
        choices=[*WEIGHT_BYTES],
        help="of saved adapters and their base, merged; by default the base's own. A run has its model.dtype",
    )
    return parser


def export_run(options: argparse.Namespace) -> Path:
    """Writes the policy of a run's checkpoint, which it returns.

    A run that goes on removes old ones, also while they are read here: then its newest is read.

    Raises:
        ConfigError: as `run`; or the checkpoint that was named was removed meanwhile.
    """
    while True:
        checkpoint = choose_checkpoint(options.run, options.iteration)
        try:
            run(checkpoint, options.to, options.model, merges=options.merge)
        except Exception as error:
            # Whatever reading of missing files ends in; all else goes on as it is.
            if checkpoint.is_dir():
                raise
            newest = newest_checkpoint(checkpoint.parent)
            if newest is None or checkpoint == options.run.absolute() or options.iteration is not None:
                raise ConfigError(
                    f"checkpoint {str(checkpoint)!r} was removed while it was read: the run goes on, and keeps "
                    "checkpoint.keep of them; name a newer one, or the run's directory"
                ) from error
            log.info("%s was removed while it was read: the run goes on; its newest is read", checkpoint.name)
        else:
            return checkpoint


def run(checkpoint: Path, target: Path, model: str | None, *, merges: bool = False) -> None:
    """Writes the policy, in a process group of this process alone, and its model card; `model` takes the place of the
    run's `model.path`.

    Raises:
        ConfigError: as `export_policy`.
    """
    # Imported after the arguments were validated, so that a typo is reported without loading torch and Megatron.
    from trainer.checkpoint.files import read_manifest
    from trainer.checkpoint.policy_export import export_policy
    from trainer.devices import choose_device
    from trainer.model_card.card import FILE, Exported, model_card
    from trainer.parallel import init_parallel

    content = read_manifest(checkpoint)
    config = parse_config(content["config"], source=f"the config in checkpoint {str(checkpoint)!r}")
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    try:
        export_policy(checkpoint, target, parallel, model, merges=merges)
    finally:
        parallel.close()
    exported = Exported(
        name=target.absolute().name,
        config=config,
        iteration=content["iteration"],
        num_steps=content["num_steps"],
        base=model or config.model.path,
        base_on_hub=not Path(model or config.model.path).exists(),
        is_adapter=config.adapter.is_given and not merges,
    )
    # Beside the checkpoint's directory: the run may have been moved since.
    write_file(target / FILE, model_card(exported, checkpoint.parent.parent))


def require_for_adapters(options: argparse.Namespace) -> None:
    """Checks what is asked of adapters that peft has saved.

    Raises:
        ConfigError: it is of no use for them.
    """
    if not options.merge:
        raise ConfigError(f"{str(options.run)!r} has adapters as peft has them already: --merge writes the whole model")
    if options.iteration is not None:
        raise ConfigError(f"--iteration chooses a run's checkpoint; {str(options.run)!r} has adapters: leave it out")


def require_for_run(options: argparse.Namespace) -> None:
    """Checks what is asked of a run.

    Raises:
        ConfigError: it is of no use for one.
    """
    if options.iteration is not None and options.iteration < 0:
        raise ConfigError(f"--iteration is {options.iteration}: expected the number of a checkpoint, from 1 on")
    if options.dtype is not None:
        raise ConfigError(f"--dtype is for saved adapters; {str(options.run)!r} has its own model.dtype: leave it out")


def merge(adapters: Path, target: Path, base: str | None, dtype: str | None) -> None:
    """Writes adapters merged into their base; raises as `export_merged`."""
    # As in `run`.
    from trainer.checkpoint.policy_export import export_merged
    from trainer.devices import choose_device
    from trainer.parallel import init_parallel

    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    try:
        export_merged(adapters, target, parallel, base, dtype)
    finally:
        parallel.close()


def choose_checkpoint(run_dir: Path, iteration: int | None) -> Path:
    """The checkpoint of a run from which `iteration` is trained next, or the newest one; `run_dir` may be one itself.

    Raises:
        ConfigError: there is no such checkpoint, or no such directory.
    """
    require_readable(run_dir, [])
    if (run_dir / MANIFEST).is_file() and iteration is None:
        return run_dir.absolute()
    directory = checkpoints_dir(run_dir)
    newest = newest_checkpoint(directory)
    if newest is None:
        raise ConfigError(
            f"{str(run_dir)!r} has no checkpoint: expected the run.dir of a run that saves them (checkpoint.every)"
        )
    if iteration is None:
        return newest
    # This module needs the extra that `main` has checked.
    from trainer.checkpoint.files import checkpoint_path

    chosen = checkpoint_path(directory, iteration)
    if not chosen.is_dir():
        names = ", ".join(path.name for path in whole_checkpoints(directory))
        raise ConfigError(f"{str(run_dir)!r} has no checkpoint {chosen.name}: there are {names}")
    return chosen


def require_empty(target: Path) -> None:
    """Checks that nothing would be overwritten.

    Raises:
        ConfigError: `target` exists and is not an empty directory, or there can be no such directory.
    """
    try:
        is_empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise ConfigError(f"--to {str(target)!r} cannot be used: {error.strerror}; name another one") from error
    if not is_empty:
        raise ConfigError(f"--to {str(target)!r} exists and is not an empty directory: name a new one")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
