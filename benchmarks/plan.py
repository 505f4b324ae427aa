"""What `async-rl plan` says of other set-ups, against runs of these set-ups.

    python -m benchmarks.plan --json [--size 2M] [--iterations N] [--only NAME ...] [--vllm .venv-vllm/bin/python]

One run is measured, whose records give the costs; each other one has something else: a batch of other sizes, fewer
responses at once, smaller windows, both pools one after the other, more instances or replicas. All are `async-rl run`
with the embedded engine, or vLLM, and a random model, whose responses end at random; the weights do not change. The
last line is one JSON object: for each set-up `measured_s`, the median of an iteration, `simulated_s`, from the costs
and batches of the first run and of one that trains after its rollouts, as `async-rl calibrate` makes them, and `ratio`,
simulated / measured; `ratio_of_one` is that of the first run's costs alone.

A machine that others use is not always as fast as in the first minutes: before and after each set-up the first run goes
again, for a few iterations. `drift` is how many times as long these take as the same ones of the first run, the mean of
both, and `ratio_without_drift` simulated / (measured / drift).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.common.random_model import SIZES, save_random_qwen3, save_word_tokenizer
from deploy.scaling.batches import Batches
from deploy.scaling.costs import Measured, measure
from deploy.scaling.simulation import SetUp

PROMPTS, RESPONSES, AT_ONCE, WINDOW = 24, 8, 64, 2048
PROMPT_WORDS = (10, 60)

CONFIG = f"""
[model]
dtype = "float32"
[prompts]
prompts_per_batch = {PROMPTS}
max_prompt_tokens = 64
chat_template = false
[rollout]
responses_per_prompt = {RESPONSES}
max_response_tokens = 96
[reward]
name = "python:reward.py:length"
[algorithm]
name = "grpo"
[optimizer]
learning_rate = 1e-12
[trainer]
micro_batch_tokens = {WINDOW}
[inference]
num_instances = 1
max_concurrency = {AT_ONCE}
"""

REWARD = """
def length(prompt, responses, row):
    return [float(len(response.token_ids) % 7) for response in responses]
"""


@dataclass(frozen=True, slots=True)
class Other:
    """What a set-up has other than the first: settings of its run, and what the simulation is told."""

    settings: Mapping[str, object] = field(default_factory=dict)
    set_up: Callable[[SetUp], SetUp] = lambda set_up: set_up
    prompts: int | None = None
    responses: int | None = None


CALIBRATION: dict[str, Mapping[str, object]] = {
    "beside": {},
    "after": {"train.mode": "synchronous", "prompts.prompts_per_batch": PROMPTS // 2},
}
"""The runs of `async-rl calibrate`."""

BASE_ITERATIONS = 10
"""Of the first set-up, each time that it goes again."""

OTHERS: dict[str, Other] = {
    "as it is": Other(),
    "half the prompts": Other({"prompts.prompts_per_batch": PROMPTS // 2}, prompts=PROMPTS // 2),
    "twice the prompts": Other({"prompts.prompts_per_batch": 2 * PROMPTS}, prompts=2 * PROMPTS),
    "half the responses": Other({"rollout.responses_per_prompt": RESPONSES // 2}, responses=RESPONSES // 2),
    "twice the responses": Other({"rollout.responses_per_prompt": 2 * RESPONSES}, responses=2 * RESPONSES),
    "a quarter at once": Other(
        {"inference.max_concurrency": AT_ONCE // 4}, lambda set_up: replace(set_up, max_running=AT_ONCE // 4)
    ),
    "four times at once": Other(
        {"inference.max_concurrency": 4 * AT_ONCE}, lambda set_up: replace(set_up, max_running=4 * AT_ONCE)
    ),
    "a quarter of the window": Other(
        {"trainer.micro_batch_tokens": WINDOW // 4}, lambda set_up: replace(set_up, window_rows=WINDOW // 4)
    ),
    "synchronous": Other({"train.mode": "synchronous"}, lambda set_up: replace(set_up, schedule="synchronous")),
    "two instances": Other({"inference.num_instances": 2}, lambda set_up: replace(set_up, num_instances=2)),
    "two replicas": Other({"trainer.num_processes": 2}, lambda set_up: replace(set_up, num_replicas=2)),
}


def prepare(directory: Path, size: str) -> None:
    sizes = SIZES[size]
    save_random_qwen3(directory / "model", dtype=torch.float32, **sizes)
    save_word_tokenizer(directory / "model", sizes["vocab_size"])
    draw = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{draw.randrange(2, sizes['vocab_size'])}" for _ in range(draw.randint(*PROMPT_WORDS)))}
        for _ in range(4096)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    (directory / "run.toml").write_text(CONFIG)


def run(directory: Path, name: str, settings: Mapping[str, object], iterations: int) -> Path:
    """Trains, and returns the run's directory.

    Raises:
        RuntimeError: the run failed.
    """
    run_dir = directory / name.replace(" ", "_")
    given = {
        "run.dir": run_dir,
        "model.path": directory / "model",
        "prompts.source": directory / "rows.jsonl",
        "train.iterations": iterations,
        **settings,
    }
    command = [
        sys.executable,
        "-m",
        "deploy.local.run",
        "run.toml",
        *(f"--{key}={value}" for key, value in given.items()),
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-2000:]}")
    return run_dir


def seconds_of(run_dir: Path) -> list[float]:
    """Of each iteration; the first two are left out."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [float(record["seconds"]) for record in records[2:]]


def drift_between(run_dir: Path, again: Path) -> float:
    """How many times as long iterations take when a run goes again, perhaps with fewer: median of the same ones."""
    return median(now / then for then, now in zip(seconds_of(run_dir), seconds_of(again), strict=False))


def simulated_s(measured: Measured, other: Other) -> float:
    return Batches(measured, other.prompts, other.responses).mean(other.set_up(measured.set_up)).seconds


def compare(
    directory: Path, size: str, iterations: int, names: list[str], engine: Mapping[str, object]
) -> dict[str, Any]:
    prepare(directory, size)
    runs = [run(directory, name, {**engine, **settings}, iterations) for name, settings in CALIBRATION.items()]
    alone, measured = measure(runs[0]), measure(*runs)

    def drift_before(name: str) -> float:
        return drift_between(runs[0], run(directory, f"before {name}", engine, min(iterations, BASE_ITERATIONS)))

    found = {}
    drifts = [drift_before(names[0])]
    for name, following in zip(names, [*names[1:], "the end"], strict=True):
        took_s = median(seconds_of(run(directory, name, {**engine, **OTHERS[name].settings}, iterations)))
        drifts.append(drift_before(following))
        said_s, drift = simulated_s(measured, OTHERS[name]), fmean(drifts[-2:])
        found[name] = {
            "measured_s": took_s,
            "simulated_s": said_s,
            "ratio": said_s / took_s,
            "drift": drift,
            "ratio_without_drift": said_s / (took_s / drift),
            "ratio_of_one": simulated_s(alone, OTHERS[name]) / took_s,
        }
        print(f"{name:<24}", *(f"{key} {value:.3f}" for key, value in found[name].items()), sep="  ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", choices=SIZES, default="2M")
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--only", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vLLM, in place of ours")
    arguments = parser.parse_args()
    engine = {}
    if arguments.vllm:
        engine = {"inference.engine": "vllm", "inference.python": arguments.vllm.absolute()}
    with tempfile.TemporaryDirectory() as directory:
        found = compare(Path(directory), arguments.size, arguments.iterations, arguments.only, engine)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
