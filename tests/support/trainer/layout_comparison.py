"""Trains layouts in real processes over gloo and compares them with one rank; for `test_layouts.py`."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.token_arrays import Logprobs
from async_rl.method.types import Group
from tests.support.trainer import layout_worker
from tests.support.trainer.bf16_bound import EPS, LEARNING_RATE, bound, roundings
from tests.support.trainer.layout_matrix import PACKED_TOKENS, Case
from tests.support.trainer.layout_worker import Job
from tests.support.trainer.random_adapters import ALL, ATTENTION, random_adapters
from trainer.forward_backward import Pass, make_passes
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TOLERANCE = 1e-5
"""For losses, gradient norms, log-probs and weights in float32."""
WEIGHTS = "model.safetensors"
PPO = {"name": "ppo", "options": {"critic_learning_rate": layout_worker.LEARNING_RATE}}


@dataclass
class Worst:
    """The largest deviation of each kind, and the case that has it."""

    deviations: dict[str, tuple[float, str]] = field(default_factory=dict)
    num_compared: int = 0

    def note(self, what: str, deviation: float, name: str) -> None:
        self.deviations[what] = max(self.deviations.get(what, (0.0, "")), (deviation, name))

    def __str__(self) -> str:
        lines = [f"{what}: {deviation:.1e} ({name})" for what, (deviation, name) in self.deviations.items()]
        return "\n  ".join([f"{self.num_compared} layouts compared; worst deviations:", *lines])


@dataclass
class Trained:
    """One rank's report of its steps, and its weights before the first step and after each."""

    report: dict[str, list[Any]]
    path: list[dict[str, torch.Tensor]]


@dataclass
class OneRank:
    """Checkpoints, samples and one rank's results on them, each computed once per session."""

    tiny_model: Callable[..., Path]
    parallel: Parallel
    groups: list[Group]
    checkpoints: dict[Any, Path] = field(default_factory=dict)
    sampled: dict[Any, list[Group]] = field(default_factory=dict)
    trained: dict[Any, Trained] = field(default_factory=dict)
    adapters: dict[Path, AdapterSection] = field(default_factory=dict)

    def job(self, case: Case, number: int = 0) -> Job:
        checkpoint = self._checkpoint(case)
        adapter = self._adapter(case)
        groups = self._sample(checkpoint, adapter)
        bf16: dict[str, Any] = {"optimizer": {"learning_rate": LEARNING_RATE}, "eps": EPS}
        return Job(
            str(number),
            str(checkpoint),
            # The second batch has an odd number of groups: replicas get shares of different sizes.
            [groups, groups[:0:-1]],
            case.section,
            {"kl_coef": 0.1 if case.reference else 0.0, "old_policy": case.old_policy, **(PPO if case.critic else {})},
            **(bf16 if case.dtype == "bfloat16" else {}),
            dtype=case.dtype,
            adapter=adapter,
        )

    def expected(self, case: Case) -> Trained:
        """The result of one rank in float32: everything packed and nothing recomputed."""
        key = (self._checkpoint(case), case.reference, case.old_policy, case.critic, case.adapters)
        if key not in self.trained:
            self.trained[key] = self.train(replace(self.job(case), dtype="float32"))
        return self.trained[key]

    def train(self, job: Job) -> Trained:
        """What one rank makes of a job, whatever its layout is."""
        trainer = layout_worker.make_trainer(job, self.parallel, TrainerSection(micro_batch_tokens=PACKED_TOKENS))
        trained = Trained({"steps": [], "rows": [], "scores": []}, [copy_of_weights(trainer)])
        for batch in job.batches:
            report = layout_worker.run(replace(job, batches=[batch]), trainer, replica=0, num_replicas=1)
            for name, entries in report.items():
                trained.report[name] += entries
            trained.path.append(copy_of_weights(trainer))
        return trained

    def _checkpoint(self, case: Case) -> Path:
        """The case's model; for bfloat16 one whose weights bfloat16 represents exactly."""
        family, tied, sizes = case.model
        path = self.tiny_model(family, tied=tied, **dict(sizes))
        if case.dtype == "float32":
            return path
        rounded = path.with_name(f"{path.name} rounded")
        if not rounded.exists():
            shutil.copytree(path, rounded)
            weights = {name: tensor.bfloat16().float() for name, tensor in load_file(path / WEIGHTS).items()}
            save_file(weights, rounded / WEIGHTS, {"format": "pt"})
        return rounded

    def _adapter(self, case: Case) -> dict[str, Any]:
        """The `[adapter]` section of the case: random ones to start from, which experts have none of."""
        if not case.adapters:
            return {}
        model = self._checkpoint(case)
        path = model.with_name(f"{model.name} adapters")
        if path not in self.adapters:
            self.adapters[path] = random_adapters(model, path, ATTENTION if case.experts else ALL)
        return self.adapters[path].model_dump()

    def _sample(self, checkpoint: Path, adapter: dict[str, Any]) -> list[Group]:
        """The groups as if sampled from the checkpoint: with the log-probs that a single process computes."""
        key = (checkpoint, bool(adapter))
        if key not in self.sampled:
            job = Job("", str(checkpoint), [], {}, adapter=adapter)
            trainer = layout_worker.make_trainer(job, self.parallel, TrainerSection())
            passes = [make_passes([[group]], self.parallel, 1.0, PACKED_TOKENS) for group in self.groups]
            with torch.no_grad():
                self.sampled[key] = [
                    with_logprobs(group, a_pass, a_pass.logprobs(trainer.models.policy_model))
                    for group, (a_pass,) in zip(self.groups, passes, strict=True)
                ]
        return self.sampled[key]


def copy_of_weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {spec.name: tensor.clone() for spec, tensor in trainer.export.stream()}


def with_logprobs(group: Group, a_pass: Pass, logprobs: Sequence[torch.Tensor]) -> Group:
    """The group with the log-probs that a pass with all of it computed."""
    values = iter(torch.cat(list(logprobs)).tolist())
    responses = list(group.responses)
    for i in (i for micro_batch in a_pass.micro_batches for part in micro_batch.slices for i in part.indices):
        responses[i] = replace(responses[i], logprobs=Logprobs(islice(values, len(responses[i].logprobs))))
    return replace(group, responses=tuple(responses))


@dataclass(frozen=True)
class Ranks:
    """The program of the ranks that train layouts, and its environment."""

    module: str = layout_worker.__name__
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


def run_distributed(
    jobs: Sequence[Job], num_ranks: int, out: Path, timeout_s: float, ranks: Ranks | None = None
) -> None:
    """Runs jobs under torchrun; a process that ends early or hangs leaves no reports of unfinished jobs."""
    ranks = ranks or Ranks()
    (out / "jobs").write_bytes(pickle.dumps(list(jobs)))
    process = subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node", str(num_ranks), "-m", ranks.module, out / "jobs", out],
        env={**ranks.environment, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
    )
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"{num_ranks} ranks were stopped after {timeout_s} s")
    finally:
        # torchrun ends its ranks on SIGTERM.
        process.terminate()
        process.wait()


def compare(
    some: Iterable[Case], one_rank: OneRank, tmp_path: Path, timeout_s: float, ranks: Ranks | None = None
) -> None:
    """Trains each case and compares it with one rank; cases of one number of ranks share their processes."""
    worst, wrong = Worst(), []
    by_ranks: dict[int, list[Case]] = {}
    for case in sorted(some):
        by_ranks.setdefault(case.placement.num_ranks, []).append(case)
    for num_ranks, ranked in by_ranks.items():
        out = tmp_path / f"{num_ranks} ranks"
        out.mkdir()
        run_distributed([one_rank.job(case, i) for i, case in enumerate(ranked)], num_ranks, out, timeout_s, ranks)
        for i, case in enumerate(ranked):
            name = f"{num_ranks} ranks: {case}"
            if (out / f"{i}.json").exists():
                report, weights = json.loads((out / f"{i}.json").read_text()), load_file(out / f"{i}.safetensors")
                wrong += note_deviations(name, case, report, weights, one_rank.expected(case), worst)
            else:
                wrong.append(f"{name}: did not finish")
    print(worst)
    assert not wrong, "\n".join(wrong)


def note_deviations(
    name: str, case: Case, report: dict[str, Any], weights: dict[str, torch.Tensor], expected: Trained, worst: Worst
) -> list[str]:
    """Compares a case with one rank; returns the deviations beyond tolerance."""
    for rows, expected_rows in zip(report["rows"], expected.report["rows"], strict=True):
        assert sorted(map(_proven, rows)) == sorted(map(_proven, expected_rows)), name
    assert set(weights) == set(expected.path[0]), name
    worst.num_compared += 1
    if case.dtype == "bfloat16":
        tolerance, found = 1.0, shares_of_bound(case, weights, expected.path)
    else:
        tolerance, found = TOLERANCE, deviations(report, weights, expected)
    for what, value in found.items():
        worst.note(what, value, name)
    return [f"{name}: {what} is {value:.1e}" for what, value in found.items() if not value <= tolerance]


def _proven(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row of the proof says of the samples, which is the same on any ranks, in pieces and whole."""
    return row["index"], row["samples"], row["num_response_tokens"], tuple(row["rewards"])


def deviations(report: dict[str, Any], weights: dict[str, torch.Tensor], expected: Trained) -> dict[str, float]:
    """The largest deviation of each quantity in float32."""
    found: dict[str, float] = {"loss": 0.0, "gradient norm": 0.0, "metrics / 10": 0.0}
    for step, expected_step in zip(report["steps"], expected.report["steps"], strict=True):
        found["loss"] = max(found["loss"], deviation(step["loss"], expected_step["loss"]))
        norm = deviation(step["grad_norm"], expected_step["grad_norm"])
        found["gradient norm"] = max(found["gradient norm"], norm)
        # Of the last merge of adapters, and only one rank exports its weights between the batches.
        expected_metrics = {key: value for key, value in expected_step["metrics"].items() if key != "merged_share"}
        # The metrics are means of values that cancel each other.
        metrics = [deviation(step["metrics"][key], value) for key, value in expected_metrics.items()]
        found["metrics / 10"] = max([found["metrics / 10"], *(x / 10 for x in metrics)])
    found["gap to the sampler"] = max(row["max_logprob_gap"] for row in report["rows"][0])
    scores, expected_scores = (
        torch.tensor([x for responses in r["scores"] for logprobs in responses for x in logprobs])
        for r in (report, expected.report)
    )
    found["scores"] = deviation(scores, expected_scores)
    found["weights"] = max(deviation(weights[name], tensor) for name, tensor in expected.path[-1].items())
    return found


def shares_of_bound(
    case: Case, weights: dict[str, torch.Tensor], path: list[dict[str, torch.Tensor]]
) -> dict[str, float]:
    """The share of the derived bound that a case in bfloat16 uses: the maximum over its weights."""
    num_roundings = roundings(dict(case.model[2])["num_hidden_layers"], case.experts, case.family)
    shares = [
        float((tensor.float() - path[-1][name]).norm()) / bound(num_roundings, [weights[name] for weights in path])
        for name, tensor in weights.items()
    ]
    return {"share of the bound of bfloat16": max(shares)}


def deviation(actual: Any, expected: Any) -> float:
    """Relative to the value, or absolute if the value is small."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    return float(((actual - expected).abs() / (1 + expected.abs())).max())
