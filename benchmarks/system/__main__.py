"""What each part of the method gains on prompts that are long: the same work in four ways, each with one thing more.

    python -m benchmarks.system --json [--repeats N] [--size SIZE] [--prompt-tokens P] [--response-tokens R]
        [--responses G] [--prompts B] [--groups-at-once N]

- `naive`: waits for all rollouts; every sample is trained with a prompt of its own, in the micro-batches that are
  fastest for that (found before); an old model and a reference run forward;
- `shared_prompts`: the prompt of a group is trained once;
- `no_old_model`: the policy's own log-probs are those of the old policy (`algorithm.old_policy = "reuse"`);
- `periodic`: training begins with the first group.

Parts are real: an instance of the embedded engine for each variant, all on one core, the Megatron trainers on another.
The variants run an iteration in turn; the first one to run rotates, and the first iteration does not count. All start
from the same weights and draw the same samples in the first iteration, so they must end it with the same weights up to
the rounding of sums. From then on a rounding error may draw another token, and the samples are others of the same
lengths.

The last line is one JSON object. For each variant, medians over the iterations: `seconds` from publish to step,
`generation_s`, `training_s` and `publish_s` of it, `speedup` over `naive` and `speedup_over_previous`, both over the
same batches. Besides, `token_ratio`, what shared prompts save in rows; `samples_per_micro_batch` of `naive`;
`same_samples`, in how many iterations, from the first one on, all variants trained the same tokens; and
`weight_difference` after the first one, see `weights.py`. The exit code is 1 if the samples of the first iteration
differ, or the weights after it by more than `MAX_DIFFERENCE`.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.config.sections import Config
from async_rl.config.trainer_section import TrainerSection
from benchmarks.common.iteration import run_iteration
from benchmarks.common.random_group import random_group
from benchmarks.common.random_model import SIZES
from benchmarks.common.running_instance import running_instance
from benchmarks.system.variants import VARIANTS, UnsharedTrainer, Variant, fastest_num_samples
from benchmarks.system.weights import MAX_DIFFERENCE, copy_weights, weight_difference
from benchmarks.system.work import Case, make_config, prepare
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.session import Session, open_session

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Of each variant, one for each iteration that counts."""

SEARCH_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """A variant that is being measured."""

    variant: Variant
    config: Config
    session: Session

    def iterate(self, iteration: int) -> dict[str, Any]:
        return run_iteration(self.session, self.config, self.session.prompts, iteration)

    def samples(self) -> list[str]:
        """A digest of the trained tokens of each iteration."""
        ledger = (self.config.run.dir / "ledger.jsonl").read_text().splitlines()
        return [json.loads(line)["samples"] for line in ledger]

    def weights(self) -> dict[str, torch.Tensor]:
        return copy_weights(self.session.megatron.models.policy_model)


def open_runs(
    case: Case, num_iterations: int, directory: Path, parallel: Parallel, core: int, closing: ExitStack
) -> list[Run]:
    room = {
        "--max-model-len": case.prompt_tokens + case.response_tokens,
        "--max-concurrency": case.groups_at_once * case.num_responses,
    }
    arguments = [text for option, number in room.items() for text in (option, str(number))]
    runs = []
    for variant in VARIANTS:
        url = closing.enter_context(running_instance(directory / "model", *arguments, core=core))
        config = make_config(case, variant, num_iterations, directory, url)
        runs.append(Run(variant, config, closing.enter_context(open_session(config, parallel))))
    return runs


def choose_num_samples(trainer: UnsharedTrainer, case: Case, say: Callable[[str], None]) -> int:
    group = random_group(case.prompt_tokens, case.response_tokens, case.num_responses, SIZES[case.size]["vocab_size"])

    def seconds_with(num_samples: int) -> float:
        trainer.num_samples = num_samples
        seconds = []
        for _ in range(SEARCH_REPEATS):
            started = time.thread_time()
            trainer.accumulate([[group]])
            seconds.append(time.thread_time() - started)
            trainer.discard()
        return min(seconds)

    return fastest_num_samples(case.num_responses, seconds_with, say)


def measure(case: Case, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    num_iterations = repeats + 1
    with ExitStack() as closing:
        directory = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        prepare(case, num_iterations, directory)
        os.sched_setaffinity(0, {cores[-1]})
        torch.set_num_threads(1)
        parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
        closing.callback(parallel.close)
        runs = open_runs(case, num_iterations, directory, parallel, cores[0], closing)
        first_weights = runs[0].weights()
        naive = UnsharedTrainer.take_over(runs[0].session.megatron)
        naive.num_samples = choose_num_samples(naive, case, say)
        records: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in VARIANTS}
        for iteration in range(num_iterations):
            first = iteration % len(runs)
            for run in runs[first:] + runs[:first]:
                record = run.iterate(iteration)
                say(describe(run.variant, iteration, record))
                records[run.variant.name].append(record)
            if iteration == 0:
                weights = [run.weights() for run in runs]
        same_samples = num_equal([run.samples() for run in runs])
    return {
        "case": asdict(case),
        "token_ratio": round(case.token_ratio, 3),
        "samples_per_micro_batch": naive.num_samples,
        "variants": summarize({name: of_variant[1:] for name, of_variant in records.items()}),
        "same_samples": same_samples,
        "weight_difference": max(weight_difference(other, weights[0], first_weights) for other in weights[1:]),
    }


def num_equal(samples: Sequence[Sequence[str]]) -> int:
    """In how many iterations, from the first one on, all have the same."""
    differing = (i for i, digests in enumerate(zip(*samples, strict=True)) if len(set(digests)) > 1)
    return next(differing, len(samples[0]))


def describe(variant: Variant, iteration: int, record: Mapping[str, Any]) -> str:
    parts = (
        f"{name} {record[key]:.2f}"
        for name, key in (
            ("generation", "rollout_s"),
            ("first group", "first_group_s"),
            ("training", "train_s"),
            ("publish", "publish_s"),
            ("step", "step_s"),
        )
    )
    return f"iteration {iteration}, {variant.name}: {record['total_s']:.2f} s ({', '.join(parts)})"


def summarize(records: Records) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for number, (name, mine) in enumerate(records.items()):
        previous = list(records.values())[max(number - 1, 0)]
        naive = next(iter(records.values()))
        found[name] = {
            **{
                key: round(statistics.median(record[field] for record in mine), 3)
                for key, field in (
                    ("seconds", "total_s"),
                    ("generation_s", "rollout_s"),
                    ("training_s", "train_s"),
                    ("publish_s", "publish_s"),
                )
            },
            "speedup": median_ratio(naive, mine),
            "speedup_over_previous": median_ratio(previous, mine),
        }
    return found


def median_ratio(others: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of `others` / `mine`, over the same batches."""
    ratios = (other["total_s"] / my["total_s"] for other, my in zip(others, mine, strict=True))
    return float(round(statistics.median(ratios), 3))


def is_sound(result: Mapping[str, Any]) -> bool:
    """Whether all variants have trained the same."""
    return bool(result["same_samples"] and result["weight_difference"] <= MAX_DIFFERENCE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system", description="What each part of the method gains, one after the other."
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object to standard output")
    parser.add_argument("--repeats", type=int, default=5, help="iterations that count (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="2M", help="of the model (default: %(default)s)")
    for name, default, meaning in (
        ("--prompt-tokens", 1024, "P: of every prompt"),
        ("--response-tokens", 128, "R: of every response"),
        ("--responses", 16, "G: of every prompt"),
        ("--prompts", 4, "of one batch"),
        ("--groups-at-once", 1, "at the instance"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default: %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    case = Case(
        options.size,
        options.prompt_tokens,
        options.response_tokens,
        options.responses,
        options.prompts,
        options.groups_at_once,
    )
    result = measure(case, options.repeats, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result))
    sys.exit(0 if is_sound(result) else 1)


if __name__ == "__main__":
    main()
