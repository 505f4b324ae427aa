"""`async-rl export RUN --to DIR`: a checkpoint's policy as a Hugging Face checkpoint, which transformers and vLLM load,
with a model card.

One process reads it, whatever layout it was saved under. Exit codes: 0 written, 2 bad input.
"""

import logging
import sys
from pathlib import Path

from async_rl.config.file import parse_config
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.files import write_file
from async_rl.programs.command_line import Parser
from async_rl.programs.extras import require_extras

log = logging.getLogger("export")


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    parser = Parser(
        "async-rl export",
        "Writes a checkpoint's policy as a Hugging Face checkpoint, which transformers and vLLM load.",
        "RUN --to DIR [--iteration N]",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory (run.dir)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write; new or empty")
    parser.add_argument("--iteration", type=int, metavar="N", help="the checkpoint iteration-N, not the newest")
    options = parser.parse_args(arguments)
    try:
        require_extras("async-rl export", "trainer")
        checkpoint = choose_checkpoint(options.run, options.iteration)
        require_empty(options.to)
        run(checkpoint, options.to)
    except ConfigError as error:
        log.error("ConfigError: %s", error)
        return 2
    log.info("wrote the policy of %s to %s", checkpoint, options.to)
    return 0


def run(checkpoint: Path, target: Path) -> None:
    """Writes the policy, in a process group of this process alone, and its model card."""
    # Imported after the arguments were validated, so that a typo is reported without loading torch and Megatron.
    from trainer.checkpoint.files import read_manifest
    from trainer.checkpoint.policy_export import export_policy
    from trainer.devices import choose_device
    from trainer.model_card.card import FILE, Exported, model_card
    from trainer.parallel import init_parallel

    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    try:
        export_policy(checkpoint, target, parallel)
    finally:
        parallel.close()
    content = read_manifest(checkpoint)
    config = parse_config(content["config"], source=f"the config in checkpoint {str(checkpoint)!r}")
    exported = Exported(
        name=target.absolute().name,
        config=config,
        iteration=content["iteration"],
        num_steps=content["num_steps"],
        base_on_hub=not Path(config.model.path).exists(),
    )
    # Beside the checkpoint's directory: the run may have been moved since.
    write_file(target / FILE, model_card(exported, checkpoint.parent.parent))


def choose_checkpoint(run_dir: Path, iteration: int | None) -> Path:
    """The checkpoint of a run from which `iteration` is trained next, or the newest one.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    # These modules need the extra that `main` has checked.
    from trainer.checkpoint.files import checkpoint_path, checkpoints_dir, newest_checkpoint, whole_checkpoints

    directory = checkpoints_dir(run_dir)
    newest = newest_checkpoint(directory)
    if newest is None:
        raise ConfigError(
            f"{str(run_dir)!r} has no checkpoint: expected the run.dir of a run that saves them (checkpoint.every)"
        )
    if iteration is None:
        return newest
    chosen = checkpoint_path(directory, iteration)
    if not chosen.is_dir():
        names = ", ".join(path.name for path in whole_checkpoints(directory))
        raise ConfigError(f"{str(run_dir)!r} has no checkpoint {chosen.name}: there are {names}")
    return chosen


def require_empty(target: Path) -> None:
    """Checks that nothing would be overwritten.

    Raises:
        ConfigError: `target` exists and is not an empty directory.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"--to {str(target)!r} exists and is not an empty directory: name a new one")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
