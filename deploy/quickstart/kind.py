"""What `async-rl quickstart` can teach: a model and a task each."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Kind:
    """One quickstart: where its parts are, and how to speak of it."""

    summary: str
    """For help and report: what learns what."""
    questions: str
    """What the data consists of, in the plural."""
    column: str
    """The column of the data that shows a question."""
    run_dir: Path
    """Where everything goes by default."""
    config: Path
    reward: str
    warm_start: str
    """The module that creates base model and data: `python -m MODULE --seed N --run-dir DIR`."""
    extras: tuple[str, ...] = ("trainer", "serve", "tasks")
    adapters: tuple[str, ...] = ()
    """Overrides with which it trains adapters in place of all weights, if it can."""


SPELLING = "spelling"
KINDS = {
    SPELLING: Kind(
        summary="A language model of 0.4 million parameters learned to spell words backward.",
        questions="words",
        column="word",
        run_dir=Path("runs/quickstart"),
        config=HERE / "config.toml",
        reward=f"python:{HERE / 'reward.py'}:spelled_backward",
        warm_start="deploy.quickstart.warm_start",
    ),
    "smollm2": Kind(
        summary="SmolLM2-135M-Instruct learned to add and subtract.",
        questions="problems",
        column="problem",
        run_dir=Path("runs/smollm2"),
        config=HERE / "smollm2" / "config.toml",
        reward=f"python:{HERE / 'smollm2' / 'reward.py'}:right_number",
        warm_start="deploy.quickstart.smollm2.warm_start",
        extras=("trainer", "serve", "tasks", "smollm2"),
        # The rate is twenty times that of all weights: with ten they gained less (docs/benchmarks.md).
        adapters=("--adapter.rank=16", "--optimizer.learning_rate=4e-4"),
    ),
}
