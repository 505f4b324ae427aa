"""A script of TRL's, as its users write it, that prints what it counted: `trl_counts.py MODULE MODEL DIR ARGUMENTS`."""

import json
import sys
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    # Spawned workers import this file as well.
    module, model, folder, arguments = sys.argv[1:]
    trl = import_module(module)

    def place(completions: list[str], **_: Any) -> list[float]:
        return [float(number % 3) for number in range(len(completions))]

    # Of one length: the order of rows is not TRL's.
    rows = [{"prompt": f"Word {n:02}"} for n in range(11)]
    given: dict[str, Any] = {"max_completion_length": 1, "logging_steps": 1, "report_to": []}
    given |= {"save_strategy": "no", "use_cpu": True, "bf16": False, "beta": 0.0, "learning_rate": 1e-3}
    args = trl.GRPOConfig(folder, **given, **json.loads(arguments))
    dataset = import_module("datasets").Dataset.from_list(rows)
    trainer = trl.GRPOTrainer(model, place, args, dataset)
    trainer.train()
    logs, num_tokens = [], 0.0
    for each in trainer.state.log_history:
        # TRL logs it where a batch begins.
        num_tokens = each.get("num_tokens", num_tokens)
        if "learning_rate" in each:
            logs.append([each["step"], each["epoch"], each["learning_rate"], num_tokens])
    print(json.dumps([trainer.state.global_step, trainer.state.max_steps, logs]))
