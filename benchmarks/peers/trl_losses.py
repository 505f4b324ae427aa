"""TRL's loss and gradient norm of given samples, for `benchmarks.peers.losses`; runs in an environment that has TRL.

    python trl_losses.py FILE

`FILE` is the JSON that `losses.py` writes. Prints a JSON list: the losses and the gradient norms of each case's steps.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


class GivenSamples:
    """Stands for generation and reward, of prompts whose text is their number."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups

    def prompt_ids(self, prompts: list[str]) -> list[list[int]]:
        return [self.groups[int(prompt)]["prompt"] for prompt in prompts]

    def each(self, prompts: list[str], value: Callable[[dict[str, Any]], list[Any]]) -> list[Any]:
        """What the responses of a group have; a prompt that is repeated has those of its group in turn."""
        return [value(self.groups[int(prompt)])[prompts[:i].count(prompt)] for i, prompt in enumerate(prompts)]

    def completion_ids(self, prompts: list[str]) -> list[list[int]]:
        return self.each(prompts, lambda group: group["responses"])

    def roll_out(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": self.prompt_ids(prompts),
            "completion_ids": self.completion_ids(prompts),
            "logprobs": self.each(prompts, lambda group: group["logprobs"]),
        }

    def rewards(self) -> list[Callable[..., list[float]]]:
        """A function for each part of the reward."""
        return [self._part(name) for name in self.groups[0]["rewards"]]

    def _part(self, name: str) -> Callable[..., list[float]]:
        def part(prompts: list[str], **_: Any) -> list[float]:
            return self.each(prompts, lambda group: group["rewards"][name])

        # By which TRL knows it.
        part.__name__ = name
        return part


class RecordingGRPO(GRPOTrainer):  # type: ignore[misc]
    """Keeps the loss of every micro-batch, which the log has only rounded."""

    samples: GivenSamples
    losses: list[float]

    @property
    def _last_loaded_step(self) -> int:
        """The current one: with `use_vllm` there are importance weights, but no server to update."""
        step: int = self.state.global_step
        return step

    @_last_loaded_step.setter
    def _last_loaded_step(self, _: int) -> None: ...

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(*arguments, **named)
        self.losses.append(float(loss))
        return loss


class RecordingRLOO(RLOOTrainer):  # type: ignore[misc]
    """Of a micro-batch it has a mean, which is divided by their number later."""

    samples: GivenSamples
    losses: list[float]

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(*arguments, **named)
        self.losses.append(float(loss) / self.args.gradient_accumulation_steps)
        return loss

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        self._prompts = prompts
        return self.samples.prompt_ids(prompts), None, {}

    def _generate_single_turn(self, *_: Any) -> list[list[int]]:
        return self.samples.completion_ids(self._prompts)


class RecordingOnlineDPO(OnlineDPOTrainer):  # type: ignore[misc]
    """Two responses per prompt: those of all prompts, then the others."""

    samples: GivenSamples
    losses: list[float]

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)
        self.losses.append(float(loss))
        return loss

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def _generate(self, model: Any, prompts: list[str], images: Any = None) -> Any:
        both = [*prompts, *prompts]
        completions = padded(self.samples.completion_ids(both), "right")
        return *padded(self.samples.prompt_ids(both), "left"), *completions, None


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask, int64 [rows, longest]."""
    ids = [torch.tensor(row) for row in rows]
    ones = [torch.ones_like(row) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_side=side),
        pad_sequence(ones, batch_first=True, padding_side=side),
    )


def make_trainer(work: dict[str, Any], case: dict[str, Any]) -> Any:
    groups, steps = case["groups"], case["steps_per_batch"]
    group_size, num_micro_batches = len(groups[0]["responses"]), case["micro_batches"]
    prompts_per_batch = len(groups) // work["num_batches"]
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(work["model"])
    tokenizer.pad_token = tokenizer.eos_token
    samples = GivenSamples(groups)
    settings = {
        "output_dir": work["directory"],
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": group_size * prompts_per_batch // num_micro_batches,
        "gradient_accumulation_steps": num_micro_batches,
        "num_generations": group_size,
        "num_iterations": steps,
        "max_completion_length": work["max_response_tokens"],
        "max_steps": work["num_batches"] * steps,
        "shuffle_dataset": False,
        "learning_rate": work["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta2": work["beta2"],
        "adam_epsilon": case["eps"],
        "gradient_checkpointing": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **case["settings"],
    }
    prompts = [str(number) for number in range(len(groups))]
    named = {"processing_class": tokenizer, "reward_funcs": samples.rewards()}
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    if case["trainer"] == "GRPOTrainer":
        # Else a term's weight is its ratio, which has a gradient.
        arguments = GRPOConfig(**{"use_bias_correction_kl": False, **settings})
        cls: Any = RecordingGRPO
        named["rollout_func"] = samples.roll_out
    elif case["trainer"] == "RLOOTrainer":
        arguments, cls = RLOOConfig(**{"beta": 0.0, **settings}), RecordingRLOO
    else:
        # It draws two responses of its own for each prompt of each step.
        for name in ("num_generations", "num_iterations", "max_completion_length", "shuffle_dataset"):
            del settings[name]
        settings["per_device_train_batch_size"] = prompts_per_batch
        batches = [prompts[i : i + prompts_per_batch] for i in range(0, len(prompts), prompts_per_batch)]
        prompts = [prompt for batch in batches for _ in range(steps) for prompt in batch]
        arguments, cls = OnlineDPOConfig(max_new_tokens=work["max_response_tokens"], **settings), RecordingOnlineDPO
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = cls(model=model, train_dataset=dataset, args=arguments, **named)
    trainer.samples, trainer.losses = samples, []
    return trainer


def train(work: dict[str, Any], case: dict[str, Any]) -> dict[str, list[float]]:
    trainer, num_micro_batches = make_trainer(work, case), case["micro_batches"]
    trainer.use_vllm = "vllm_importance_sampling_mode" in case["settings"]
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    losses = [sum(trainer.losses[i : i + num_micro_batches]) for i in range(0, len(trainer.losses), num_micro_batches)]
    return {"losses": losses, "grad_norms": norms}


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    print(json.dumps([train(work, case) for case in work["cases"]]))


if __name__ == "__main__":
    main()
