"""One timed iteration of the real loop, and what bounds a periodic one; for benchmarks of the period."""

import json
import time
from typing import Any

from async_rl.config.sections import Config
from async_rl.config.train_section import TrainSection
from async_rl.loop import PromptBatches, train
from trainer.session import Session


def run_iteration(session: Session, config: Config, prompts: PromptBatches, iteration: int = 0) -> dict[str, Any]:
    """Trains a batch; returns its metrics record with `total_s`, the seconds from publish to step."""
    section = TrainSection.model_validate({**config.train.model_dump(), "iterations": iteration + 1})
    started = time.monotonic()
    train(section, session.rank, prompts, session.rollouts, session.ledger, session.recorder, iteration)
    total = time.monotonic() - started
    record = json.loads((config.run.dir / "metrics.jsonl").read_text().splitlines()[-1])
    return {**record, "total_s": total}


def bound(record: dict[str, Any]) -> float:
    """Seconds that no schedule of a periodic iteration's work on the same two cores can beat."""
    overlapped = max(record["rollout_s"], record["first_group_s"] + record["train_s"])
    return float(overlapped + record["publish_s"] + record["step_s"])
