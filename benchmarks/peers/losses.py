"""Whether both sides compute the same loss from the same samples: tokens and rewards that are given to both.

Each case of `CASES` (`loss_cases.py`) is two batches of two prompts on a tiny model, mostly trained in two optimizer
steps each: the first of them has a ratio of 1 and, in the first batch, no KL yet; the second one clips. All begin with
the weights that the one before left, so that the optimizers are compared, too. With the settings of a case all is equal
but for the 1e-4 that TRL adds to a deviation, where async-rl adds 1e-6: rewards that are divided by one are large.
"""

import json
from pathlib import Path
from typing import Any

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, Response
from benchmarks.common.random_model import save_endless_qwen3, save_word_tokenizer
from benchmarks.peers.loss_cases import (
    CASES,
    END,
    MAX_RESPONSE_TOKENS,
    NUM_BATCHES,
    PROMPTS_PER_BATCH,
    SIZE,
    Case,
    make_groups,
)
from benchmarks.peers.processes import guarded
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.policy import optimizer
from trainer.trainer import MegatronTrainer

TRL_LOSSES = Path(__file__).with_name("trl_losses.py")
LEARNING_RATE = 1e-3
"""Large, so that the second step's loss depends on what the first one did."""
LIMIT_S = 300.0


def prepare(directory: Path) -> dict[str, Any]:
    """Writes the model; returns what both sides need to know."""
    save_endless_qwen3(directory / "model", **SIZE)
    save_word_tokenizer(directory / "model", SIZE["vocab_size"])
    return {
        "directory": str(directory),
        "model": str(directory / "model"),
        "num_batches": NUM_BATCHES,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "learning_rate": LEARNING_RATE,
        "beta2": OptimizerSection().beta2,
        "cases": [
            {
                "groups": make_groups(case),
                "trainer": case.trainer,
                "settings": case.theirs,
                "micro_batches": case.micro_batches,
                "steps_per_batch": case.steps_per_batch,
                "eps": case.eps,
            }
            for case in CASES.values()
        ],
    }


def group_of(index: int, given: dict[str, Any], times: float) -> Group:
    parts = {part: tuple(times * reward for reward in rewards) for part, rewards in given["rewards"].items()}
    responses = tuple(
        Response(
            token_ids=TokenIds(token_ids),
            logprobs=Logprobs(logprobs),
            text="",
            finish_reason="stop" if token_ids[-1] == END else "length",
            weight_spans=(),
            instance="",
        )
        for token_ids, logprobs in zip(given["responses"], given["logprobs"], strict=True)
    )
    return Group(
        iteration=0,
        index=index,
        prompt=Prompt(str(index), TokenIds(given["prompt"]), {}),
        responses=responses,
        rewards=tuple(map(sum, zip(*parts.values(), strict=True))),
        reward_parts=tuple(parts.items()) if len(parts) > 1 else (),
        weight_version="",
        started_s=0.0,
        finished_s=0.0,
    )


def our_losses(work: dict[str, Any]) -> list[dict[str, list[float]]]:
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    try:
        return [
            _train(parallel, work["model"], case, given["groups"])
            for case, given in zip(CASES.values(), work["cases"], strict=True)
        ]
    finally:
        parallel.close()


def _train(parallel: Parallel, model: str, case: Case, given: list[dict[str, Any]]) -> dict[str, list[float]]:
    optimizer.EPS = case.eps
    trainer = MegatronTrainer(
        parallel,
        TrainerSection(),
        ModelSection(path=model),
        RolloutSection(responses_per_prompt=case.responses, max_response_tokens=MAX_RESPONSE_TOKENS),
        AlgorithmSection(**{"old_policy": "model", **case.ours}),
        OptimizerSection(learning_rate=LEARNING_RATE),
        TrainSection(iterations=NUM_BATCHES, mode="synchronous"),
    )
    groups = [group_of(index, one, case.times) for index, one in enumerate(given)]
    steps = []
    for first in range(0, len(groups), PROMPTS_PER_BATCH):
        trainer.before_publish()
        for _ in range(case.steps_per_batch):
            trainer.accumulate([groups[first : first + PROMPTS_PER_BATCH]])
            steps.append(trainer.optimizer_step())
    return {"losses": [step.loss for step in steps], "grad_norms": [step.grad_norm for step in steps]}


def trl_losses(work: dict[str, Any], python: str) -> list[dict[str, list[float]]]:
    directory = Path(work["directory"])
    (directory / "work.json").write_text(json.dumps(work))
    with guarded([python, str(TRL_LOSSES), str(directory / "work.json")], directory) as side:
        side.require_success(LIMIT_S)
    found: list[dict[str, list[float]]] = json.loads(side.output().splitlines()[-1])
    return found


def compare(directory: Path, python: str) -> dict[str, float]:
    """For each case the largest difference of the steps' losses, and of their gradient norms, relative to the norm.

    Losses are compared as they are: advantages sum to 0, and with a ratio of 1 and `"sequence"` so does the loss.
    """
    work = prepare(directory)
    found: dict[str, float] = {}
    for name, ours, theirs in zip(CASES, our_losses(work), trl_losses(work, python), strict=True):
        losses, norms = (list(zip(ours[key], theirs[key], strict=True)) for key in ("losses", "grad_norms"))
        if CASES[name].same_loss:
            found[f"loss_difference.{name}"] = max(abs(our - their) for our, their in losses)
        found[f"grad_norm_difference.{name}"] = max(abs(our - their) / their for our, their in norms)
    return found
