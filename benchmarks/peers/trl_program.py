"""TRL's GRPOTrainer on the work of `benchmarks.peers`; runs in an environment that has TRL, and none of async-rl.

    python trl_program.py JSON

Prints, after each step, the processor seconds of this process so far and the seconds on the clock, and at the end the
number of tokens of all completions.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def even_words(completions: list[str], **_: Any) -> list[float]:
    """As `REWARD` in `benchmarks.peers.work`."""
    words = [completion.split() for completion in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in found) / max(len(found), 1) for found in words]


class Clock(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        print(json.dumps({"cpu_s": time.process_time(), "wall_s": time.monotonic()}), flush=True)


def main() -> None:
    work = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(work["rows"]).read_text().splitlines()]
    num_responses = work["num_groups"] * work["group_size"]
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    tokenizer.pad_token = tokenizer.eos_token
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=even_words,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=work["directory"],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=work["micro_batch"],
            gradient_accumulation_steps=num_responses // work["micro_batch"],
            num_generations=work["group_size"],
            max_completion_length=work["response_tokens"],
            generation_kwargs={"min_new_tokens": work["response_tokens"]},
            max_steps=work["iterations"],
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            beta=work["kl_coef"],
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
