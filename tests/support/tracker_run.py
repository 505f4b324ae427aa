"""A run with one tracker, in an environment that has it: `python -m tests.support.tracker_run NAME DIR STEPS`.

Logs STEPS, as in `0,1,2`, as a run that begins at the first of them, with samples and an evaluation.
"""

import sys
from pathlib import Path

from async_rl.config.sections import TrackingSection
from async_rl.records.trackers.choice import open_trackers

CONFIG = {"run": {"seed": 7}, "reward": {"name": "math", "api_key": "hunter2"}}


def main(name: str, run_dir: Path, steps: list[int]) -> None:
    trackers = open_trackers(TrackingSection(trackers=(name,), project="tests"), run_dir, steps[0], CONFIG)
    for step in steps:
        trackers.log_record({"iteration": step, "loss": step / 10, "pass@2": 0.5, "mfu": None})
        response = {"text": f"answer {step}", "reward": 1.0, "num_tokens": 3, "finish_reason": "stop"}
        trackers.log_samples(
            step, [{"iteration": step, "index": 0, "prompt_id": "7", "prompt": "1 + 1?", "responses": [response]}]
        )
        trackers.log_evaluation(step, "held-out", {"pass@1": 0.25})
    trackers.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(step) for step in sys.argv[3].split(",")])
