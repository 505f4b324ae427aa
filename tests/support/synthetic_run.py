"""Run directories with records of any size, without a run: for the dashboard's tests.

The rows have the fields of real ones; figures are functions of the seed.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.records.rotation import SAMPLES, TIMELINE

SCRIPT = "<script>document.title = 'broken'</script>"
"""Part of every response, as a model may write it."""


@dataclass(frozen=True, slots=True)
class SyntheticRun:
    """How large the run is; instance i takes part from iteration `10 * i` on, and instance 1 leaves in the middle."""

    run_dir: Path
    num_iterations: int
    num_groups: int = 8
    num_instances: int = 2
    num_left_out: int = 0
    seed: int = 0

    def write(self, first: int = 0, last: int | None = None) -> None:
        """Appends the records of the iterations from `first` up to, without, `last`."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        numbers = range(first, self.num_iterations if last is None else last)
        for name, rows in (("metrics", map(self.record, numbers)), ("ledger", map(self.proof, numbers))):
            with (self.run_dir / f"{name}.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        for iteration in numbers:
            TIMELINE.append(self.run_dir, self.groups(iteration))
            SAMPLES.append(self.run_dir, self.samples(iteration))

    def record(self, iteration: int) -> dict[str, Any]:
        noise = self._random(iteration)
        progress = 1 - math.exp(-3 * iteration / self.num_iterations)
        gap = 1e-6 * (1 + noise.random())
        figures = {f"extra_metric_{number}": noise.gauss(0, 1) for number in range(20)}
        return {
            "iteration": iteration,
            "iterations": self.num_iterations,
            "weight_version": f"v-{iteration}",
            "seconds": 11.2 + noise.random(),
            "wait_s": 1 + noise.random(),
            "train_s": 7.5,
            "publish_s": 0.5,
            "step_s": 0.25,
            "rollout_s": 8 + noise.random(),
            "first_group_s": 0.8,
            "reward_mean": 0.1 + 0.8 * progress + noise.gauss(0, 0.02),
            "reward_std": 0.4 - 0.2 * progress,
            "accuracy": min(1.0, 0.05 + 0.8 * progress + 0.02 * noise.random()),
            "response_tokens_mean": 120 + 60 * progress + noise.gauss(0, 4),
            "tokens_per_s": 3000 + noise.gauss(0, 100),
            "loss": noise.gauss(0, 0.01),
            "grad_norm": 0.8 + 0.1 * noise.random(),
            "learning_rate": 2e-5,
            "entropy": None if iteration == 3 else 1.2 - 0.8 * progress,
            "kl": 0.02 * progress,
            "merged_share": 0.98 * progress,
            "on_policy": True,
            "logprob_gap_rms": gap,
            "max_logprob_gap": 12 * gap,
            "num_groups": self.num_groups,
            "num_instances": self.num_instances,
            "response_tokens_histogram": [
                [64, 96, 40],
                [96, 128, 4 * self.num_groups],
                [128, 192, 3 * self.num_groups],
            ],
            "spans": [["publish", 0.0, 0.5], ["period", 0.5, 10.9], ["step", 10.9, 11.15]],
            "idle_training": 0.1,
            "idle_inference": 0.2,
            **figures,
        }

    def proof(self, iteration: int) -> dict[str, Any]:
        urls = self._urls(iteration)
        return {
            "iteration": iteration,
            "weight_version": f"v-{iteration}",
            "fingerprint": "f7410938ceb2fa67ab8f7642d202c1ef",
            "on_policy": True,
            "num_groups": self.num_groups,
            "num_responses": 8 * self.num_groups,
            "num_response_tokens": 1200 * self.num_groups,
            "num_continued": 0,
            "num_resampled": 0,
            "samples": "d74f146688ac1d75",
            "max_logprob_gap": self.record(iteration)["max_logprob_gap"],
            "logprob_gaps": {
                "rms": self.record(iteration)["logprob_gap_rms"],
                "largest_rms": 3e-4,
                "unjudged": None,
                "instances": {url: {"tokens": 1200 * self.num_groups // len(urls), "rms": 1e-6} for url in urls},
            },
            "num_violations": 0,
            "violations": [],
        }

    def groups(self, iteration: int) -> Iterator[dict[str, Any]]:
        noise = self._random(iteration)
        urls = self._urls(iteration)
        rest = {"versions": [f"v-{iteration}"], "num_turns": 8, "num_branches": 0, "num_corrected": 0}
        ends = sorted(min(9.0, 1 + noise.expovariate(0.5)) for _ in range(self.num_groups))
        for index in range(self.num_groups + self.num_left_out):
            is_trained = index < self.num_groups
            started = 0.5 + noise.random() * 0.3
            finished = started + ends[index] if is_trained else 0.0
            window = math.ceil(finished)
            yield {
                "iteration": iteration,
                "index": index,
                "prompt_id": str(1000 + index),
                **rest,
                **({} if is_trained else {"is_trained": False}),
                "num_responses": 8,
                "num_prompt_tokens": 40,
                "num_response_tokens": int(900 + 80 * finished + 200 * noise.random()),
                "reward_mean": round(noise.random(), 3) if is_trained else 1.0,
                "attempts": 2 if index % 50 == 7 else 1,
                "num_continued": 0,
                "num_resampled": 0,
                "num_truncated": 0,
                "samples": "1b4f27a5fc46d4c7",
                "logprob_gaps": {urls[index % len(urls)]: {"tokens": 1200, "rms": 1e-6}} if is_trained else {},
                **(_times(started, finished, window) if is_trained else {}),
            }

    def samples(self, iteration: int) -> Iterator[dict[str, Any]]:
        noise = self._random(iteration)
        for index in range(min(3, self.num_groups)):
            yield {
                "iteration": iteration,
                "index": index,
                "prompt_id": str(1000 + index),
                "weight_version": f"v-{iteration}",
                "prompt": f"What is {iteration} + {index}?",
                "responses": [_response(f"{iteration + index}", reward, noise) for reward in (1.0, index / 2 - 0.5)],
            }

    def _urls(self, iteration: int) -> list[str]:
        middle = range(self.num_iterations // 2, self.num_iterations * 3 // 4)
        return [
            f"http://10.0.0.{number}:8000"
            for number in range(self.num_instances)
            if iteration >= 10 * number and not (number == 1 and iteration in middle)
        ]

    def _random(self, iteration: int) -> random.Random:
        return random.Random(f"{self.seed}/{iteration}")


def _times(started: float, finished: float, window: int) -> dict[str, float]:
    return {
        "started_s": round(started, 6),
        "finished_s": round(finished, 6),
        "train_started_s": window - 0.1,
        "train_finished_s": window + 0.7,
    }


def _response(answer: str, reward: float, noise: random.Random) -> dict[str, Any]:
    tokens = ["The", " answer", " is", f" {answer}", ".", f" {SCRIPT}"]
    rollout = [-round(noise.random(), 6) for _ in tokens]
    return {
        "text": "".join(tokens),
        "reward": reward,
        "num_tokens": len(tokens),
        "finish_reason": "stop",
        "tokens": tokens,
        "rollout_logprobs": rollout,
        "trainer_logprobs": [round(value + noise.choice((-1, 1)) * 10 ** -noise.uniform(2, 6), 6) for value in rollout],
    }
