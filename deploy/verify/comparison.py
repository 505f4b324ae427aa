"""Compares two runs of the same samples by their records and their models; called by `verification.py`."""

import filecmp
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ProcessFailed
from async_rl.records.findings import Finding, fails, holds, not_tested
from async_rl.records.run_records import Record, RunRecords

FIGURE_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Of losses and gradient norms, relative, by dtype: sums of the same terms in another order. Layouts of one model agree
to 1e-5 in float32; in bfloat16 a gradient is rounded to 2^-9 at each of its operations."""

WEIGHT_BOUNDS = {"float32": 2e-2, "bfloat16": 2e-1}
"""RMS of the weights' difference, as a share of the RMS of their change: AdamW's first steps are of full size wherever
a gradient is not 0, and of either sign where it is of the size of its rounding error."""

WEIGHT_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-8}
"""Added to it, as a share of the RMS of the weights: that of one rounding to the dtype in which they are written."""

MAX_SHARE_OTHERWISE = 0.02
"""Share of a batch's groups that may have other samples because a log-prob was rounded otherwise beside other requests
and a draw fell right there."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run of some iterations left in its directory."""

    metrics: Sequence[Record]
    ledger: Sequence[Record]
    groups: Sequence[Record]
    model: Path

    @classmethod
    def read(cls, run_dir: Path) -> "Trained":
        run = RunRecords(run_dir)
        return cls(
            list(run.metrics.new_records()), list(run.ledger.new_records()), list(run.groups()), run_dir / "model"
        )

    def is_proven(self, iterations: int) -> bool:
        """Whether every iteration is there, once, and on-policy."""
        trained, proven = ([each["iteration"] for each in records] for records in (self.metrics, self.ledger))
        return trained == proven == list(range(iterations)) and all(proof["on_policy"] for proof in self.ledger)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares runs of `iterations` iterations under `dtype`, from the model `start`.

    `demands_bits`: whether gradients, losses and weights have to be equal bit for bit, else within the bounds.
    """

    iterations: int
    dtype: str
    start: str
    demands_bits: bool

    def figures(self, check: str, key: str, run: Trained, other: Trained, scale: float) -> Finding:
        """Compares a figure of every iteration; differences count relative to it, or to `scale` where it is smaller."""
        pairs = [(a[key], b[key]) for a, b in zip(run.metrics, other.metrics, strict=False)]
        bad = [i for i, pair in enumerate(pairs) if None in pair]
        if len(pairs) < self.iterations or bad:
            where = f"iteration {bad[0]} has none that is finite" if bad else f"only {len(pairs)} iterations are whole"
            return fails(check, where)
        shown = ", ".join(f"{a:.6g}" for a, _ in pairs)
        if all(a == b for a, b in pairs):
            return holds(check, f"equal in {len(pairs)} iterations ({shown})", "equal bit for bit")
        worst = max(abs(a - b) / max(abs(a), abs(b), scale) for a, b in pairs)
        bound = FIGURE_BOUNDS[self.dtype]
        text = f"differ by {worst:.2g} at most, relative ({shown})"
        if self.demands_bits:
            return fails(check, text, "equal bit for bit")
        return (holds if worst <= bound else fails)(check, text, f"{bound:g}")

    def weights(self, check: str, run: Trained, other: Trained) -> Finding:
        """Compares the models after the last iteration."""
        if not (run.model.is_dir() and other.model.is_dir()):
            return fails(check, "a run wrote no model")
        if equal_files(run.model, other.model):
            return holds(check, f"equal after {self.iterations} iterations", "equal bit for bit")
        gap = distance(run.model, other.model, self.start)
        bound = WEIGHT_BOUNDS[self.dtype] * gap["rms_of_change"] + WEIGHT_ROUNDOFF[self.dtype] * gap["rms_of_weights"]
        shown = (
            f"{gap['num_different']:.0f} of {gap['num_weights']:.0f} weights differ, RMS {gap['rms']:.2g}, largest "
            f"{gap['largest']:.2g}; training changed them by an RMS of {gap['rms_of_change']:.2g}"
        )
        if self.demands_bits:
            return fails(check, shown, "equal bit for bit")
        return (holds if gap["rms"] <= bound else fails)(check, shown, f"RMS {bound:.2g}")

    def same_run(
        self,
        check: str,
        said: str,
        run: Trained,
        expected: Trained,
        *,
        is_repeatable: bool,
        has_program: bool = False,
    ) -> Finding:
        """Whether a run with a fault is the run without; where samples are not repeatable, whether it is proven.

        `has_program`: rollouts are those of a program, which may do something else each time.
        """
        if not run.is_proven(self.iterations):
            return fails(check, f"{said}, but not every iteration is there once and on-policy")
        said = f"{said}; {self.iterations} iterations proven"
        if not is_repeatable:
            return holds(check, f"{said}; samples and weights are not compared: this engine does not repeat them")
        if [proof["samples"] for proof in run.ledger] != [proof["samples"] for proof in expected.ledger]:
            if has_program:
                why = "its rollouts are others than without the fault, as those of a program may be in any run"
                return not_tested(check, f"{said}; {why}")
            return self._other_samples(check, run, expected)
        if reward := _other_reward(run, expected):
            return not_tested(check, reward)
        weights = self.weights(check, run, expected)
        shown = f"{said}; samples equal, weights {weights.shown}"
        return Finding(check, weights.outcome, shown, weights.bound)

    def _other_samples(self, check: str, run: Trained, expected: Trained) -> Finding:
        """In the first iteration that differs: all that follows depends on it."""
        if reward := _other_reward(run, expected):
            return not_tested(check, reward)
        others = {(row["iteration"], row["index"]): row["samples"] for row in expected.groups}
        # With a reserve a group may have been left out in one of the runs alone, before it had finished.
        pairs = [
            (row["iteration"], row["samples"] == others[row["iteration"], row["index"]])
            for row in run.groups
            if (row["iteration"], row["index"]) in others
        ]
        first = next((iteration for iteration, is_same in pairs if not is_same), None)
        same = [is_same for iteration, is_same in pairs if iteration == first]
        num_other = same.count(False)
        shown = f"{num_other} of {len(same)} groups of iteration {first} have other samples than without the fault"
        if same and num_other <= max(1, MAX_SHARE_OTHERWISE * len(same)):
            return not_tested(check, f"{shown}, as rounding may cause: run it again")
        return fails(check, shown, "equal samples")


def _other_reward(run: Trained, expected: Trained) -> str:
    """Why two runs may go apart without a fault, if so: equal samples had other rewards; else empty.

    Only up to the first iteration with other samples: later ones have other prompts' histories and weights.
    """
    others = {(row["iteration"], row["index"]): row for row in expected.groups}
    last = math.inf
    for row in run.groups:
        other = others.get((row["iteration"], row["index"]))
        if other is None or row["iteration"] > last:
            continue
        if row["samples"] != other["samples"]:
            last = min(last, row["iteration"])
        elif row["reward_mean"] != other["reward_mean"]:
            return (
                f"the reward is not repeatable: group {row['index']} of iteration {row['iteration']} has the same "
                f"samples in both runs, and mean rewards of {other['reward_mean']:g} and {row['reward_mean']:g}; so "
                "they train on something else"
            )
    return ""


def equal_files(first: Path, second: Path) -> bool:
    """Whether two directories have the same tensors in the same files, byte by byte."""
    names = [sorted(file.name for file in path.glob("*.safetensors")) for path in (first, second)]
    if names[0] != names[1] or not names[0]:
        return False
    return not any(filecmp.cmpfiles(first, second, names[0], shallow=False)[1:])


def distance(first: Path, second: Path, start: str) -> dict[str, float]:
    """See `trainer/verify/distance.py`, which runs as a process of its own: this one does not load torch.

    Raises:
        ProcessFailed: a model cannot be read.
    """
    argv = [sys.executable, "-m", "trainer.verify.distance", str(first), str(second), start]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise ProcessFailed(f"the weights in {first} and {second} cannot be compared:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def why_no_gradient(run: Trained) -> str | None:
    """Why equal gradients and losses would prove nothing, if so."""
    if run.metrics and all(record["grad_norm"] == 0.0 for record in run.metrics):
        return (
            "every gradient is 0, because the rewards of each group are all equal: take prompts on which responses "
            "differ, or more --iterations"
        )
    return None


def why_no_step(run: Trained) -> str | None:
    """Why equal weights would prove nothing, if so."""
    if run.metrics and all(record["learning_rate"] == 0.0 for record in run.metrics):
        return "the learning rate is 0 in every iteration: set optimizer.warmup_iterations = 0"
    return why_no_gradient(run)


def compared(check: str, power: str | None, compare: Callable[[], Finding]) -> Finding:
    """A comparison, unless it would prove nothing."""
    return not_tested(check, power) if power else compare()
