"""Whether both sides compute the same loss from the same samples: tokens and rewards that are given to both.

Two steps of two prompts on a tiny model. The first has a ratio of 1 and, where there is a reference, no KL yet; the
second begins with the weights that the first one left, so it compares the optimizers, too.

With `normalize = "token"` here and `loss_type = "dapo"` there (both defaults), or `"sequence"` and `"grpo"`, with the
same `beta2`, and without division by the standard deviation, all is equal. With it, TRL adds 1e-4 to the deviation,
async-rl 1e-6.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch

from async_rl.config.sections import (
    AlgorithmSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    TrainerSection,
    TrainSection,
)
from async_rl.types import Group, Prompt, Response
from benchmarks.common.random_model import SIZES, save_endless_qwen3, save_word_tokenizer
from benchmarks.peers.processes import guarded
from trainer.devices import choose_device
from trainer.parallel import init_parallel
from trainer.trainer import MegatronTrainer

TRL_LOSSES = Path(__file__).with_name("trl_losses.py")
SIZE = SIZES["tiny"]
NUM_STEPS = 2
PROMPTS_PER_STEP = 2
RESPONSES = 4
LEARNING_RATE = 1e-3
"""Large, so that the second step's loss depends on what the first one did."""
LIMIT_S = 300.0


def make_groups() -> list[dict[str, Any]]:
    """Prompts and responses of different lengths."""
    draw = random.Random(0)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(2, SIZE["vocab_size"]) for _ in range(draw.randint(least, most))]

    return [
        {
            "prompt": tokens(5, 12),
            "responses": [tokens(3, 9) for _ in range(RESPONSES)],
            "rewards": [draw.random() for _ in range(RESPONSES)],
        }
        for _ in range(NUM_STEPS * PROMPTS_PER_STEP)
    ]


def prepare(directory: Path, algorithm: AlgorithmSection) -> dict[str, Any]:
    """Writes the model; returns what both sides need to know."""
    save_endless_qwen3(directory / "model", **SIZE)
    save_word_tokenizer(directory / "model", SIZE["vocab_size"])
    return {
        "directory": str(directory),
        "model": str(directory / "model"),
        "groups": make_groups(),
        "num_steps": NUM_STEPS,
        "learning_rate": LEARNING_RATE,
        "beta2": optimizer_section().beta2,
        **algorithm.model_dump(include={"kl_coef", "scale_by_std", "normalize"}),
    }


def optimizer_section() -> OptimizerSection:
    return OptimizerSection(learning_rate=LEARNING_RATE)


def group_of(index: int, given: dict[str, Any]) -> Group:
    responses = tuple(
        Response(
            token_ids=tuple(token_ids),
            logprobs=(0.0,) * len(token_ids),
            text="",
            finish_reason="length",
            weight_spans=(),
            instance="",
        )
        for token_ids in given["responses"]
    )
    return Group(
        iteration=0,
        index=index,
        prompt=Prompt(str(index), tuple(given["prompt"]), {}),
        responses=responses,
        rewards=tuple(given["rewards"]),
        weight_version="",
        started_s=0.0,
        finished_s=0.0,
    )


def our_losses(work: dict[str, Any], algorithm: AlgorithmSection) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    try:
        trainer = MegatronTrainer(
            parallel,
            TrainerSection(),
            ModelSection(path=work["model"]),
            RolloutSection(responses_per_prompt=RESPONSES),
            algorithm,
            optimizer_section(),
            TrainSection(iterations=NUM_STEPS),
        )
        groups = [group_of(index, given) for index, given in enumerate(work["groups"])]
        steps = []
        for first in range(0, len(groups), PROMPTS_PER_STEP):
            trainer.accumulate([groups[first : first + PROMPTS_PER_STEP]])
            steps.append(trainer.optimizer_step())
    finally:
        parallel.close()
    return {"losses": [step.loss for step in steps], "grad_norms": [step.grad_norm for step in steps]}


def trl_losses(work: dict[str, Any], python: str) -> dict[str, list[float]]:
    directory = Path(work["directory"])
    (directory / "work.json").write_text(json.dumps(work))
    with guarded([python, str(TRL_LOSSES), str(directory / "work.json")], directory) as side:
        side.require_success(LIMIT_S)
    found: dict[str, list[float]] = json.loads(side.output().splitlines()[-1])
    return found


def compare(directory: Path, algorithm: AlgorithmSection, python: str) -> dict[str, float]:
    """The largest difference of the steps' losses, and of their gradient norms, relative to the norm.

    Losses are compared as they are: advantages sum to 0, and with a ratio of 1 and `"sequence"` so does the loss.
    """
    work = prepare(directory, algorithm)
    theirs, ours = trl_losses(work, python), our_losses(work, algorithm)
    losses, norms = (list(zip(ours[name], theirs[name], strict=True)) for name in ("losses", "grad_norms"))
    return {
        "loss_difference": max(abs(our - their) for our, their in losses),
        "grad_norm_difference": max(abs(our - their) / their for our, their in norms),
    }
