"""What the warm starts of the quickstarts have in common: their command line, their files, and the training."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deploy.quickstart.splits import Splits, write_rows
from deploy.quickstart.supervised import Course, Example, teach


def make_parser(program: str, course: Course) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=course.max_steps)
    return parser


def write_data(run_dir: Path, splits: Splits) -> None:
    """Writes the rows that the run and its evaluations read to `data/`."""
    write_rows(run_dir / "data" / "held_out.jsonl", splits.held_out)
    write_rows(run_dir / "data" / "prompts.jsonl", splits.prompts)


def make_base_model(
    run_dir: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Example],
    validation: Sequence[Example],
    course: Course,
    seed: int,
) -> None:
    """Teaches `model`, with a record per check in `warm_start.jsonl`, and writes it to `base_model/`."""
    with (run_dir / "warm_start.jsonl").open("w", buffering=1) as log:
        for check in teach(model, train, validation, course, seed=seed):
            log.write(json.dumps(asdict(check)) + "\n")
    model.save_pretrained(run_dir / "base_model")
    tokenizer.save_pretrained(run_dir / "base_model")
