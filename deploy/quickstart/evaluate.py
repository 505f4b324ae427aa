"""Measures a checkpoint on the held-out words, with the instance and program of `async-rl eval`; for the quickstart.

Every word gets one response, sampled at temperature 1 as in the run, which counts only if it is exactly right and
ended: that is pass@1 under the quickstart's reward, where only such a response earns `correct_at`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.local.evaluate import evaluate

CONFIG = Path(__file__).with_name("config.toml")
REWARD = f"python:{Path(__file__).with_name('reward.py')}:spelled_backward"

Record = dict[str, Any]
"""accuracy, num_words, and the first samples: word, answer, response (None if it did not end), correct."""


def measure(model: Path, rows: Path, out: Path, console: Console) -> Record:
    """Evaluates the checkpoint `model` on `rows`, a JSONL file; logs and results are written to the directory `out`.

    Raises:
        ProcessFailed: the instance or the evaluation failed.
    """
    values = {
        "run.dir": out,
        "model.path": model,
        "prompts.source": rows,
        "reward.name": REWARD,
        "evaluation.sets": json.dumps([{"name": rows.stem, "source": str(rows)}]),
    }
    done = evaluate(CONFIG, [f"--{key}={value}" for key, value in values.items()], console)
    (result,) = done.results
    return {
        "accuracy": result["pass@1"],
        "num_words": result["num_prompts"],
        "samples": [_sample(sample) for sample in done.samples],
    }


def _sample(sample: Mapping[str, Any]) -> Record:
    row, (response,) = sample["row"], sample["responses"]
    text = response["text"] if response["finish_reason"] == "stop" else None
    return {"word": row["word"], "answer": row["answer"], "response": text, "correct": text == row["answer"]}
