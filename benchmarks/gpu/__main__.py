"""The trainer on one GPU: shared compared with unshared prompts, a complete step, and a publish.

    python -m benchmarks.gpu --json [--device cpu --size tiny]

The trainer of a run on a Qwen3 checkpoint with random bf16 weights, and micro-batches of random tokens, one group
of at least 8k rows each. The last line is one JSON object:

- `cases`: forward and backward of one group, `shared_s` with its prompt once and `unshared_s` with a prompt per sample,
  in micro-batches of no more rows; medians, with the rows and the peak bytes of each. `speedup` is their ratio,
  `token_ratio` = G (P + R) / (P + G R) the ratio if cost were proportional to rows, `mfu` that of `shared_s`;
- `step`: `step_s`, the seconds from four groups' arrival to the end of their step, by the methods that the loop calls
  (windows, layout, passes, sums, ledger rows and their exchange, gradient scaling, clipping, Adam); tokens per second
  and model FLOPs utilisation. `step_with_reference` is the same with `kl_coef` > 0; its utilisation counts the
  reference's forward pass, too;
- `parts`: seconds of a group's parts: its layout; the layers forward and backward, of which attention both ways; the
  log-probs, both ways; the optimizer's step, gradient norm included;
- `publish`: the weights sent to a second process of this machine, or why that was skipped.

MFU counts the matrix products of forward and backward over the time, against the peak of `trainer.devices.peak_flops`;
null if the device is not in that table. `kernel` is what computed attention.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group
from async_rl.shared.weights.collectives import BACKENDS
from benchmarks.common.random_group import random_group
from benchmarks.common.unshared import samples_of
from benchmarks.gpu.model import PASSES, SIZES, device_name, make_checkpoint, model_flops
from benchmarks.gpu.publish import measure_publish
from trainer.attention.shared_attention import checked_kernel, shared_prompt_attention
from trainer.batching.group_slice import num_rows, slices_of
from trainer.batching.shared_prompt import MicroBatch, make_micro_batch
from trainer.devices import choose_device
from trainer.devices.peak_flops import peak_flops_of
from trainer.model.gpt import SharedPromptGPT
from trainer.parallel import Parallel, init_parallel
from trainer.trainer import MegatronTrainer

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One group: tokens of the prompt and of each response, and how many responses."""

    prompt: int
    response: int
    num_responses: int

    @property
    def token_ratio(self) -> float:
        unshared = self.num_responses * (self.prompt + self.response)
        return unshared / (self.prompt + self.num_responses * self.response)


CASES = {
    "tiny": (Case(12, 6, 4),),
    "0.6b": (Case(1024, 512, 16), Case(4096, 320, 16), Case(256, 1024, 8)),
}
MICRO_BATCHES_PER_STEP = 4


def make_group(case: Case, vocab_size: int, index: int = 0) -> Group:
    return random_group(case.prompt, case.response, case.num_responses, vocab_size, index)


def make_micro_batches(group: Group, device: torch.device, shared: bool) -> list[MicroBatch]:
    """The group as one micro-batch, or as samples with a prompt each, in micro-batches of no more rows."""
    if shared:
        return [make_micro_batch(slices_of([group]), device)]
    samples = samples_of([group])
    chunk = max(1, num_rows(group) // samples[0].num_rows)
    return [make_micro_batch(samples[i : i + chunk], device) for i in range(0, len(samples), chunk)]


class Finished:
    """Groups whose rollouts have all finished."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)

    def ready(self, wait: bool) -> list[Group]:
        ready, self._groups = self._groups, []
        return ready

    def begin(self, groups: Sequence[Group]) -> None:
        """Nobody waits for more."""

    def cancel(self, indices: Collection[int]) -> None:
        raise AssertionError("the groups of a batch without a reserve are all trained")


class Bench:
    """The trainer of a run on one device, with random weights, and timing that synchronizes with the device."""

    def __init__(self, checkpoint: Path, size: str, kl_coef: float, parallel: Parallel, repeats: int) -> None:
        self.shape = SIZES[size]
        self.device = parallel.device.DEVICE
        self._repeats = repeats
        longest = max(num_rows(make_group(case, self.shape.vocab_size)) for case in CASES[size])
        self.trainer = MegatronTrainer(
            parallel,
            # A micro-batch holds one group.
            TrainerSection(micro_batch_tokens=longest),
            ModelSection(path=str(checkpoint), dtype="bfloat16"),
            RolloutSection(),
            AlgorithmSection(kl_coef=kl_coef),
            OptimizerSection(),
            TrainSection(iterations=1),
        )

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        for micro_batch in micro_batches:
            logprobs_N, *_ = self.trainer.models.policy(micro_batch, 1.0)
            (-logprobs_N.sum()).backward()

    def step(self, groups: Sequence[Group]) -> None:
        """The loop's work from the groups' arrival to the end of the step, except the proof's comparison."""
        batch = Batch(0, {group.index: group.prompt for group in groups})
        order = TrainingOrder(Finished(groups), TrainSection(iterations=1), [batch])
        order.begin_mini_batch()
        rows = [row for window in self.trainer.windows(order) for row in self.trainer.accumulate(window)]
        rows = self.trainer.gather(rows)
        stats = self.trainer.optimizer_step()
        assert len(rows) == len(groups) and not stats.skipped and stats.num_untrained == 0, f"no whole step: {stats}"

    def seconds(self, function: Callable[[], object]) -> float:
        """Median of the repeats, after one uncounted run, which compiles, allocates and connects."""
        times = []
        for _ in range(self._repeats + 1):
            self._wait()
            started = time.perf_counter()
            function()
            self._wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def peak_bytes(self, function: Callable[[], None]) -> int | None:
        """Peak bytes of tensors while `function` runs, including weights and gradients; None on a CPU."""
        if self.device.type != "cuda":
            function()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        self._wait()
        return torch.cuda.max_memory_allocated(self.device)

    def mfu(self, micro_batches: Sequence[MicroBatch], seconds: float, passes: int = PASSES) -> float | None:
        peak = peak_flops_of(self.device, DTYPE)
        flops = model_flops(self.shape, micro_batches) * passes / PASSES
        return None if peak is None else round(flops / seconds / peak, 4)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure_case(bench: Bench, case: Case) -> dict[str, Any]:
    group = make_group(case, bench.shape.vocab_size)
    result: dict[str, Any] = {"prompt": case.prompt, "response": case.response, "responses": case.num_responses}
    for name, shared in (("shared", True), ("unshared", False)):
        micro_batches = make_micro_batches(group, bench.device, shared)
        run = partial(bench.forward_backward, micro_batches)
        seconds = bench.seconds(run)
        result[f"{name}_s"] = round(seconds, 5)
        result[f"{name}_rows"] = sum(batch.rows.segments.num_rows for batch in micro_batches)
        result[f"{name}_peak_bytes"] = bench.peak_bytes(run)
        if shared:
            result["mfu"] = bench.mfu(micro_batches, seconds)
    bench.trainer.discard()
    result["speedup"] = round(result["unshared_s"] / result["shared_s"], 3)
    result["token_ratio"] = round(case.token_ratio, 3)
    return result


def measure_parts(bench: Bench, case: Case) -> dict[str, float]:
    """Seconds of the parts of one group's forward and backward, and of a step on what they left."""
    model, device = bench.trainer.models.policy_model, bench.device
    group = make_group(case, bench.shape.vocab_size)
    (micro_batch,) = make_micro_batches(group, device, shared=True)
    hidden_TH = model.rows_for_logits(model.hidden(micro_batch.rows)).detach().requires_grad_()

    def logprobs() -> None:
        model.scores(hidden_TH, micro_batch.labels, 1.0)[0].sum().backward()

    def step() -> None:
        bench.trainer.optimizer.step(bench.trainer.optimizer.gradient_norm())

    seconds = {
        "layout_s": bench.seconds(lambda: make_micro_batches(group, device, shared=True)),
        "layers_forward_s": bench.seconds(lambda: model.hidden(micro_batch.rows)),
        "attention_s": bench.shape.num_layers * bench.seconds(partial(attend, model, micro_batch)),
        "logprobs_s": bench.seconds(logprobs),
    }
    whole = bench.seconds(lambda: bench.forward_backward([micro_batch]))
    seconds["layers_backward_s"] = whole - seconds["layers_forward_s"] - seconds["logprobs_s"]
    seconds["optimizer_s"] = bench.seconds(step)
    bench.trainer.discard()
    return {name: round(value, 5) for name, value in seconds.items()}


def attend(model: SharedPromptGPT, micro_batch: MicroBatch) -> None:
    """One layer's attention, both ways, on rows of zeros: its time does not depend on the values."""
    segments = micro_batch.rows.segments
    shape, device = model.shape, model.parallel.device.DEVICE
    query, key, value = (
        torch.zeros(segments.num_rows, heads, shape.head_dim, dtype=DTYPE, device=device, requires_grad=True)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    shared_prompt_attention(query, key, value, segments, shape.head_dim**-0.5, model.kernel).sum().backward()


def measure_step(bench: Bench, case: Case) -> dict[str, Any]:
    groups = [make_group(case, bench.shape.vocab_size, index) for index in range(MICRO_BATCHES_PER_STEP)]
    seconds = bench.seconds(lambda: bench.step(groups))
    micro_batches = [batch for group in groups for batch in make_micro_batches(group, bench.device, shared=True)]
    rows = sum(batch.rows.segments.num_rows for batch in micro_batches)
    passes = PASSES + (bench.trainer.models.reference is not None)
    return {
        "step_s": round(seconds, 5),
        "micro_batches": len(micro_batches),
        "rows": rows,
        "rows_per_s": round(rows / seconds, 1),
        "response_tokens_per_s": round(sum(group.num_response_tokens for group in groups) / seconds, 1),
        "mfu": bench.mfu(micro_batches, seconds, passes),
    }


def measure(parallel: Parallel, size: str, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    shape, device = SIZES[size], parallel.device
    kernel = checked_kernel(device, DTYPE, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    result: dict[str, Any] = {
        "device": device_name(device.DEVICE),
        "torch": torch.__version__,
        "size": size,
        "kernel": type(kernel).__name__,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), shape)
        bench = Bench(Path(name), size, 0.0, parallel, repeats)
        result["parameters"] = sum(parameter.numel() for parameter in bench.trainer.models.policy.parameters())
        for case in CASES[size]:
            result["cases"].append(measure_case(bench, case))
            say(f"case: {result['cases'][-1]}")
        result["parts"] = measure_parts(bench, CASES[size][0])
        say(f"parts: {result['parts']}")
        result["step"] = measure_step(bench, CASES[size][0])
        say(f"step: {result['step']}")
        export = bench.trainer.export
        result["publish"] = measure_publish(export.specs, export.stream, BACKENDS[device.DEVICE.type], repeats)
        say(f"publish: {result['publish']}")
        # Both trainers at once would not fit on every device.
        del bench, export
        result["step_with_reference"] = measure_step(Bench(Path(name), size, 0.05, parallel, repeats), CASES[size][0])
        say(f"step with reference: {result['step_with_reference']}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The trainer on one GPU.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--size", choices=list(SIZES), default="0.6b", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of everything (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    try:
        device = choose_device(options.device)
    except ConfigError as error:
        parser.error(str(error))
    parallel = init_parallel(device, 0, TrainerSection())
    try:
        print(json.dumps(measure(parallel, options.size, options.repeats, say)))
    finally:
        parallel.close()


if __name__ == "__main__":
    main()
