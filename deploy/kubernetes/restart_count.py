"""Counts the restarts of the training pods, in a file of the run: the first pod does so whenever it starts.

JobSet makes all training pods anew when any of them has failed, and numbers these attempts; it sets no limit itself
(`RestartJobSetAndIgnoreMaxRestarts`). So a process, a pod and a node that are lost count alike, and the limit has the
meaning that `cluster.max_restarts` has everywhere: restarts without progress.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from async_rl.errors import RestartsExhausted
from async_rl.shared.files import write_file
from deploy.cluster.restarts import Restarts

FILE: Final = Path("kubernetes", "restarts.json")


def count_attempt(run_dir: Path, attempt: int, restarts: Restarts, num_trained: int, cause: str | None) -> float:
    """The seconds to wait before an attempt to train; 0 for the first one.

    Args:
        run_dir: exists.
        attempt: how often JobSet has started the pods again. A pod that was evicted comes back in the same attempt.
        restarts: the limit; receives the counts.
        num_trained: proven iterations so far.
        cause: of the last loss, where it is known.

    Raises:
        RestartsExhausted: the pods were lost too often without progress.
        WriteFailed: the count cannot be kept.
    """
    file = run_dir / FILE
    known = json.loads(file.read_text()) if file.exists() else {"attempt": 0}
    # JobSet counts from 0 again when the run is launched again.
    if known["attempt"] > attempt or attempt == 0:
        known = {"attempt": 0}
    for name in ("total", "without_progress", "most_trained"):
        setattr(restarts, name, known.get(name, 0))
    restarts.note_progress(num_trained)
    delay_s = 0.0
    for _ in range(attempt - known["attempt"]):
        next_s = restarts.next_delay_s()
        if next_s is None:
            raise RestartsExhausted(
                f"the training pods were lost after {restarts.limit} restarts without another iteration in between "
                f"(cluster.max_restarts = {restarts.limit}); the last time: {cause or 'a pod or its node was lost'}"
            )
        delay_s = next_s
    counts = {name: value for name, value in asdict(restarts).items() if name not in ("limit", "first_delay_s")}
    file.parent.mkdir(exist_ok=True)
    write_file(file, json.dumps({"attempt": attempt, **counts}) + "\n")
    return delay_s
