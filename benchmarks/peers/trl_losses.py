"""TRL's loss and gradient norm of given samples, for `benchmarks.peers.losses`; runs in an environment that has TRL.

    python trl_losses.py FILE

`FILE` is the JSON that `losses.py` writes. Prints one JSON object: the losses and the gradient norms of its steps.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class GivenSamples:
    """Stands for generation and reward, of prompts whose text is their number."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def roll_out(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        groups = [self._groups[int(prompt)] for prompt in prompts]
        taken = [prompts[:i].count(prompt) for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [group["prompt"] for group in groups],
            "completion_ids": [group["responses"][i] for group, i in zip(groups, taken, strict=True)],
            "logprobs": None,
        }

    def rewards(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        groups = [self._groups[int(prompt)] for prompt in prompts]
        return [
            group["rewards"][group["responses"].index(ids)] for group, ids in zip(groups, completion_ids, strict=True)
        ]


class RecordingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Keeps the loss of every micro-batch, which the log has only rounded."""

    losses: list[float]

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(*arguments, **named)
        self.losses.append(float(loss))
        return loss


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    samples = GivenSamples(work["groups"])
    group_size, num_steps = len(work["groups"][0]["responses"]), work["num_steps"]
    num_responses = group_size * len(work["groups"]) // num_steps
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    tokenizer.pad_token = tokenizer.eos_token
    trainer = RecordingTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=samples.rewards,
        rollout_func=samples.roll_out,
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(work["groups"]))]),
        args=GRPOConfig(
            output_dir=work["directory"],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=num_responses // 2,
            gradient_accumulation_steps=2,
            num_generations=group_size,
            max_completion_length=max(len(ids) for group in work["groups"] for ids in group["responses"]),
            max_steps=num_steps,
            shuffle_dataset=False,
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta2=work["beta2"],
            beta=work["kl_coef"],
            scale_rewards="group" if work["scale_by_std"] else "none",
            loss_type="dapo" if work["normalize"] == "token" else "grpo",
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.losses = []
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    losses = [sum(trainer.losses[i : i + 2]) for i in range(0, len(trainer.losses), 2)]
    print(json.dumps({"losses": losses, "grad_norms": norms}))


if __name__ == "__main__":
    main()
