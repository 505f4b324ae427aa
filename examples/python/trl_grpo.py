"""A script for TRL: only the import is another one. `python trl_grpo.py [MODEL]`."""

import sys

from async_rl.trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def correct(completions, answer, **kwargs):
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(completions, answer, strict=True)]


def brief(completions, **kwargs):
    return [-len(text) / 100 for text in completions]


args = GRPOConfig(
    output_dir="runs/trl",
    reward_weights=[1.0, 0.1],
    num_generations=4,
    per_device_train_batch_size=16,
    max_completion_length=16,
    max_steps=2,
    logging_steps=1,
)
trainer = GRPOTrainer(
    model=sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B",
    reward_funcs=[correct, brief],
    args=args,
    train_dataset=rows,
)
trainer.train()
print(trainer.state.log_history[-1]["rewards/brief/mean"])
