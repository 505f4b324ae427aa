"""When a task of a run that died is started again, and after what delay: pure policy; for every launcher.

A task is started again at most `cluster.max_restarts` times without progress in between. Progress is a further
iteration in `ledger.jsonl`; for an instance, one of whose tokens it sampled some. Iterations that a resumed run trains
again are no progress.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from async_rl import errors
from async_rl.errors import ProcessFailed, RestartsExhausted
from async_rl.records.run_records import RunRecords

MAX_DELAY_S: Final = 60.0
MAX_DOUBLINGS: Final = 100
"""Of the delay; twice as many as make a minute of a nanosecond, and still a number."""

DONE: Final = 0
BAD_INPUT: Final = 2
NO_FLEET: Final = 3
"""Of an instance: no trainer answered for its patience."""

LASTING: Final = 4
"""A fault that no restart mends."""

FENCED: Final = 5
"""Of the trainer: another one has taken over the run."""

STOPPED: Final = 143
"""128 + SIGTERM."""

FINAL_CODES: Final = frozenset({DONE, BAD_INPUT, NO_FLEET, LASTING, FENCED, STOPPED})
"""Exit codes after which no task is started again."""


def may_restart(code: int, cause: str | None) -> bool:
    """Whether a task that ended so is started again.

    Args:
        code: its exit code, 128 + N where signal N ended it. torchrun exits with 1 whatever its ranks exited with.
        cause: the name of the error that it reported; None where it reported none, as after a signal.
    """
    named = getattr(errors, cause, None) if cause else None
    return code not in FINAL_CODES and getattr(named, "may_pass", True)


COUNTS: Final = ("total", "without_progress", "most_trained")
"""What a launcher keeps whose own process may be replaced."""


@dataclass(slots=True)
class Restarts:
    """Counts the restarts of one task, and decides on the next one.

    Attributes:
        limit: `cluster.max_restarts`.
        first_delay_s: doubles with each restart without progress, up to `MAX_DELAY_S`.
        total: all restarts.
        without_progress: those since the last progress.
        most_trained: the most iterations that were trained at the end of a start.
    """

    limit: int
    first_delay_s: float = 1.0
    total: int = 0
    without_progress: int = 0
    most_trained: int = 0

    def note_progress(self, num_trained: int) -> None:
        """Counts from 0 again if more iterations are trained than ever before."""
        if num_trained > self.most_trained:
            self.most_trained = num_trained
            self.without_progress = 0

    def next_delay_s(self) -> float | None:
        """Counts one more restart, and returns the seconds to wait before it; None if there were too many."""
        if self.without_progress >= self.limit:
            return None
        delay_s = min(self.first_delay_s * 2.0 ** min(self.without_progress, MAX_DOUBLINGS), MAX_DELAY_S)
        self.without_progress += 1
        self.total += 1
        return delay_s

    def exhausted(self, name: str, failure: ProcessFailed) -> ProcessFailed | RestartsExhausted:
        """What ends the run once there are no more; `failure` itself where none were allowed."""
        if self.limit == 0:
            return failure
        return RestartsExhausted(
            f"{name} was started again {self.limit} times without another iteration in between "
            f"(cluster.max_restarts = {self.limit}); the last time: {failure.cause or 'it died'}: {failure}"
        )

    def counts(self) -> dict[str, int]:
        """What `resume` takes."""
        return {name: getattr(self, name) for name in COUNTS}

    def resume(self, counts: Mapping[str, Any], num_trained: int) -> None:
        """Takes over the counts of an earlier start."""
        for name in COUNTS:
            setattr(self, name, counts.get(name, 0))
        self.note_progress(num_trained)


def num_trained(run_dir: Path, took_part: Callable[[str], bool] | None = None) -> int:
    """How many iterations of a run are proven, from the last proof in its ledger that can be read.

    Args:
        run_dir: may lack a ledger: 0 iterations.
        took_part: by an instance's URL, whether it is the one in question: the last iteration that it took part in
            counts. None counts every iteration.
    """
    for proof in RunRecords(run_dir).ledger.newest_first():
        if proof.get("on_policy") is not True or not isinstance(proof.get("iteration"), int):
            continue
        if took_part is None or any(map(took_part, proof["logprob_gaps"]["instances"])):
            return int(proof["iteration"]) + 1
    return 0
