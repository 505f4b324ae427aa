"""Measures a checkpoint on held-out data, with the instance and program of `async-rl eval`; for the quickstarts.

Every prompt gets one response, sampled at temperature 1 as in the run, which counts only if it is exactly right and
ended: that is pass@1 under the quickstarts' rewards, where only such a response earns `correct_at`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.local.evaluate import evaluate
from deploy.quickstart.kind import Kind

Record = dict[str, Any]
"""accuracy, num_prompts, and the first samples: question, answer, response (None if it did not end), correct."""


def measure(kind: Kind, model: Path, rows: Path, out: Path, console: Console) -> Record:
    """Evaluates the checkpoint `model` on `rows`, a JSONL file; logs and results are written to the directory `out`.

    Raises:
        ProcessFailed: the instance or the evaluation failed.
    """
    values = {
        "run.dir": out,
        "model.path": model,
        "prompts.source": rows,
        "reward.name": kind.reward,
        "evaluation.sets": json.dumps([{"name": rows.stem, "source": str(rows)}]),
    }
    done = evaluate(kind.config, [f"--{key}={value}" for key, value in values.items()], console)
    (result,) = done.results
    return {
        "accuracy": result["pass@1"],
        "num_prompts": result["num_prompts"],
        "samples": [_sample(kind, sample) for sample in done.samples],
    }


def _sample(kind: Kind, sample: Mapping[str, Any]) -> Record:
    row, (response,) = sample["row"], sample["responses"]
    text = response["text"] if response["finish_reason"] == "stop" else None
    return {"question": row[kind.column], "answer": row["answer"], "response": text, "correct": text == row["answer"]}
