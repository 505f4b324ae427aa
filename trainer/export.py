"""`async-rl export RUN --to DIR`: a checkpoint's policy as a Hugging Face checkpoint, which transformers and vLLM load.

One process reads it, under whatever layout it was saved. Exit codes: 0 written, 2 bad input.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config import TrainerSection, parse_config
from async_rl.errors import ConfigError
from trainer.checkpoint import fill, read_checked
from trainer.checkpoint_files import checkpoint_path, checkpoints_dir, newest_checkpoint, whole_checkpoints
from trainer.checkpoint_tensors import POLICY, model_tensors
from trainer.devices import choose_device
from trainer.hf_checkpoint import save_hf_checkpoint
from trainer.hf_config import find_checkpoint, read_model_shape
from trainer.model import build_model
from trainer.parallel import Parallel, init_parallel

log = logging.getLogger("export")


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="async-rl export", description="write a checkpoint's policy for inference")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory (run.dir)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write; new or empty")
    parser.add_argument("--iteration", type=int, metavar="N", help="the checkpoint iteration-N, not the newest")
    options = parser.parse_args(arguments)
    try:
        checkpoint = choose_checkpoint(options.run, options.iteration)
        require_empty(options.to)
        parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
        try:
            export(checkpoint, options.to, parallel)
        finally:
            parallel.close()
    except ConfigError as error:
        log.error("ConfigError: %s", error)
        return 2
    log.info("wrote the policy of %s to %s", checkpoint, options.to)
    return 0


def choose_checkpoint(run_dir: Path, iteration: int | None) -> Path:
    """The checkpoint of a run from which `iteration` is trained next, or the newest one.

    Raises:
        ConfigError: there is none.
    """
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
        ConfigError: something would.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"--to {str(target)!r} exists and is not an empty directory: name a new one")


def export(checkpoint: Path, target: Path, parallel: Parallel) -> None:
    """Writes the policy of `checkpoint` to `target`; config, tokenizer and so on are those of the run's `model.path`.

    Raises:
        ConfigError: the checkpoint is damaged, or the run's model is no longer there.
    """
    content = read_checked(checkpoint, parallel)
    config = parse_config(content["config"], source=f"the config in checkpoint {str(checkpoint)!r}")
    source = find_checkpoint(config.model.path)
    model = build_model(read_model_shape(source), getattr(torch, config.model.dtype), parallel, TrainerSection())
    fill(checkpoint, model_tensors(model, POLICY), parallel, dist.group.WORLD)
    save_hf_checkpoint(model, source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
