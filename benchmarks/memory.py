"""The forecast of `async-rl check` against the memory that real runs use on a CPU, at three sizes of the model.

    python -m benchmarks.memory --json [--sizes 2M 31M 135M] [--dtype float32]

Each size is a whole run of `async-rl run`: one instance, one training rank, random weights, responses of full length,
so that a micro-batch has as many rows as `trainer.micro_batch_tokens` allows. Measured is the peak of resident memory
that the kernel keeps for each process (VmHWM in /proc). The last line is one JSON object: for each size and each
process `measured_bytes`, `forecast_bytes` and `ratio`, which is forecast / measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from async_rl.checks.forecast.run_forecast import forecast_run
from async_rl.checks.preflight.model import read_shape
from async_rl.config.file import load_config
from benchmarks.common.random_model import SIZES, save_endless_qwen3, save_word_tokenizer

DEFAULT = ("2M", "31M", "135M")
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_RESPONSES = 64, 57, 8
ROWS = PROMPT_TOKENS + NUM_RESPONSES * (RESPONSE_TOKENS - 1)
"""Of one group, and so of one micro-batch: the last token of a response is not fed."""

POLL_S = 0.1

CONFIG = """
[run]
dir = "{folder}/run"
[model]
path = "{folder}/model"
dtype = "{dtype}"
[prompts]
source = "{folder}/rows.jsonl"
prompts_per_batch = 4
max_prompt_tokens = {prompt}
chat_template = false
[rollout]
responses_per_prompt = {responses}
max_response_tokens = {response}
[reward]
name = "python:{folder}/reward.py:length"
[algorithm]
kl_coef = {kl_coef}
[train]
iterations = 3
order = "prompt"
[trainer]
micro_batch_tokens = {rows}
[checkpoint]
every = 0
"""

REWARD = """
def length(prompt, responses, row):
    return [float(sum(response.token_ids) % 7) for response in responses]
"""


def write_run(folder: Path, size: str, dtype: str, kl_coef: float) -> Path:
    """Writes model, rows, reward and config of one run; returns the config's path."""
    model = folder / "model"
    save_endless_qwen3(model, dtype=getattr(torch, dtype), max_position_embeddings=1024, **SIZES[size])
    save_word_tokenizer(model, SIZES[size]["vocab_size"])
    rows = [{"prompt": " ".join(f"w{2 + (i + j) % 200}" for j in range(PROMPT_TOKENS))} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    config = folder / "run.toml"
    config.write_text(
        CONFIG.format(
            folder=folder,
            dtype=dtype,
            kl_coef=kl_coef,
            prompt=PROMPT_TOKENS,
            response=RESPONSE_TOKENS,
            responses=NUM_RESPONSES,
            rows=ROWS,
        )
    )
    return config


def measured_peaks(config: Path, *overrides: str) -> dict[str, int]:
    """Runs a config, with overrides, to its end; the largest VmHWM of a training rank and of an instance, in bytes.

    Raises:
        RuntimeError: the run failed; with the end of what it said.
    """
    peaks: dict[str, int] = {"trainer": 0, "instance": 0}
    log = config.with_name("output.txt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "deploy.local.run", str(config), *overrides],
            stdout=output,
            stderr=output,
            env=environment,
        )
        while run.poll() is None:
            _note_peaks(run.pid, peaks)
            time.sleep(POLL_S)
    if run.returncode:
        raise RuntimeError(f"the run of {config} ended with {run.returncode}: {log.read_text()[-2000:]}")
    return peaks


def _note_peaks(pid: int, peaks: dict[str, int]) -> None:
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return
    for process in processes:
        try:
            words = process.cmdline()
            peak = _peak_bytes(process.pid)
        except (psutil.Error, OSError, IndexError):
            continue  # It has ended in between.
        role = "instance" if "inference_service" in words else "trainer" if _is_rank(words) else None
        if role:
            peaks[role] = max(peaks[role], peak)


def _is_rank(words: Sequence[str]) -> bool:
    return "async_rl.trainer" in words and "async_rl.torchrun" not in words


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forecasts(config: Path) -> dict[str, int]:
    """What `async-rl check` forecasts of the same run, in bytes."""
    loaded = load_config(config)
    forecast = forecast_run(loaded, read_shape(loaded.model.path))
    return {"trainer": forecast.rank.num_bytes, "instance": forecast.instance.num_bytes}


def measure(size: str, dtype: str, kl_coef: float) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(Path(folder), size, dtype, kl_coef)
        expected, found = forecasts(config), measured_peaks(config)
    return {
        role: {
            "measured_bytes": found[role],
            "forecast_bytes": expected[role],
            "ratio": round(expected[role] / found[role], 3),
        }
        for role in found
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=DEFAULT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kl-coef", type=float, default=0.0, help="above 0 the run has a reference model")
    arguments = parser.parse_args(argv)
    figures = {}
    for size in arguments.sizes:
        figures[size] = measure(size, arguments.dtype, arguments.kl_coef)
        if not arguments.json:
            for role, each in figures[size].items():
                print(
                    f"{size:>6} {role:<9} measured {each['measured_bytes'] / 2**20:8,.0f} MiB   forecast "
                    f"{each['forecast_bytes'] / 2**20:8,.0f} MiB   ratio {each['ratio']:.3f}",
                    flush=True,
                )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
