"""The benefit of holding a prompt once: forward and backward of one group, shared and unshared, on one CPU thread.

    python -m benchmarks.shared_prompt --json [--repeats N] [--case P R G]

A small Qwen3-shaped Megatron stack in float32, as the trainer builds it, with log-probs of the response tokens only.
Four ways to compute the same gradients, run alternately on the same tokens, in processor seconds:

- shared: as the trainer runs it, one micro-batch with the prompt once, then all responses; beyond SHARED_ROWS rows, in
  two stages;
- packed: the same code on the same layout without sharing, every sample a separate group with one response;
- padded: a batch of equal length under one causal mask per sample. Samples have equal lengths here, so nothing is
  wasted on padding, and attention is a single call of PyTorch's causal attention;
- chunked: packed, in chunks of as many samples as fit into CHUNKED_ROWS rows, at least one, whose gradients add up. On
  a CPU this is fastest for unshared samples: smaller activations fit into faster caches.

The last line is one JSON object: `speedup` is the median time of the faster of packed and padded over that of shared,
`speedup_chunked` that of chunked; `token_ratio` = G (P + R) / (P + G R) is their value if cost were proportional to
tokens. Attention is not: responses attend to their prompt either way. Peak bytes are those of the tensors that a run
allocates, without gradients of the weights.
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from megatron.core.distributed import DistributedDataParallel

from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from async_rl.shared.model_shape import ModelShape
from benchmarks.common.memory import allocated
from benchmarks.common.random_group import random_group
from benchmarks.common.unshared import samples_of
from trainer.attention.segments import Segments
from trainer.batching.group_slice import num_rows, slices_of
from trainer.batching.shared_prompt import Labels, MicroBatch, Rows, make_micro_batch
from trainer.devices import choose_device
from trainer.devices.attention_part import Part
from trainer.forward_backward import TwoStagePass
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.parallel import Parallel, init_parallel

CASES = ((64, 256, 8), (512, 128, 8), (1024, 128, 16), (2048, 256, 8), (256, 1024, 8))
"""(prompt tokens, response tokens, responses)."""

SHARED_ROWS = 4096
"""Corresponds to `trainer.micro_batch_tokens`."""

CHUNKED_ROWS = 1280
"""Among the fastest sizes; from one sample to a third of the group, times differ little."""

SHAPE = ModelShape(
    family="qwen3",
    num_layers=2,
    hidden_size=512,
    ffn_size=1408,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope=None,
    tied=False,
)

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    prompt: int
    response: int
    group: int

    @property
    def token_ratio(self) -> float:
        return self.group * (self.prompt + self.response) / (self.prompt + self.group * self.response)


def make_group(case: Case, vocab_size: int) -> Group:
    return random_group(case.prompt, case.response, case.group, vocab_size)


def shared(model: SharedPromptGPT, group: Group, weights_GR: torch.Tensor, max_rows: int) -> None:
    """Adds the gradients of a group, in two stages if it has more than `max_rows` rows."""
    if num_rows(group) <= max_rows:
        run(model, [make_micro_batch(slices_of([group]), CPU)], weights_GR)
        return
    (whole,) = slices_of([group])
    stages = TwoStagePass(whole, model.parallel, 1.0, max_rows)
    weights = weights_GR.flatten().split([len(batch.labels.labels_N) for batch in stages.micro_batches])
    # Of Megatron's DDP it needs only the model inside.
    wrapped = SimpleNamespace(module=model)
    stages.train(
        cast(DistributedDataParallel, wrapped),
        lambda number, logprobs_N, *_: (logprobs_N * weights[number]).sum(),
    )


def packed(group: Group, chunk: int) -> list[MicroBatch]:
    """Every sample with its own prompt, `chunk` samples in a micro-batch."""
    samples = samples_of([group])
    return [make_micro_batch(samples[i : i + chunk], CPU) for i in range(0, len(samples), chunk)]


def padded(group: Group, chunk: int) -> list[MicroBatch]:
    """Batches of `chunk` samples, each under its causal mask; all have one length."""
    samples = [(*group.prompt.token_ids, *response.token_ids) for response in group.responses]
    return [_padded_batch(samples[i : i + chunk], len(group.prompt.token_ids)) for i in range(0, len(samples), chunk)]


def _padded_batch(samples: Sequence[tuple[int, ...]], num_prompt: int) -> MicroBatch:
    tokens_BS = torch.tensor(samples)
    num_samples, length = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    positions_BS = torch.arange(length).expand(num_samples, length)
    lens = (length,) * num_samples
    rows_BS = torch.arange(num_samples * length).view(num_samples, length)
    labels_BR = tokens_BS[:, num_prompt:]
    return MicroBatch(
        (),
        Rows(tokens_BS[:, :-1].flatten(), positions_BS.flatten(), Segments(Part(lens, lens, True, CPU), None)),
        Labels(
            rows_BS[:, num_prompt - 1 :].flatten(),
            torch.arange(labels_BR.numel()),
            labels_BR.flatten(),
            *torch.full((2, num_samples), labels_BR.shape[1]),
        ),
    )


def run(model: SharedPromptGPT, micro_batches: Sequence[MicroBatch], weights_GR: torch.Tensor) -> None:
    """Adds the gradients of sum(weights * log-probs) over the micro-batches, which hold the first samples in order."""
    counts = [len(batch.labels.labels_N) for batch in micro_batches]
    weights = weights_GR.flatten()[: sum(counts)].split(counts)
    for batch, weights_N in zip(micro_batches, weights, strict=True):
        logprobs_N, *_ = model(batch, 1.0)
        (logprobs_N * weights_N).sum().backward()


def make_model(shape: ModelShape, parallel: Parallel) -> SharedPromptGPT:
    """A model with random weights."""
    model = build_model(shape, torch.float32, parallel, TrainerSection())
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms have one dimension.
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02)
    return model


def measure(model: SharedPromptGPT, case: Case, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times the four ways alternately; the first one rotates with every repeat."""
    group = make_group(case, model.shape.vocab_size)
    weights_GR = torch.randn(case.group, case.response)
    chunk = min(case.group, max(1, CHUNKED_ROWS // (case.prompt + case.response - 1)))
    batches = {
        "packed": packed(group, case.group),
        "padded": padded(group, case.group),
        "chunked": packed(group, chunk),
    }
    ways: dict[str, Callable[[], None]] = {"shared": lambda: shared(model, group, weights_GR, SHARED_ROWS)}
    ways |= {name: functools.partial(run, model, batch, weights_GR) for name, batch in batches.items()}
    peaks = {name: _peak_bytes(model, way) for name, way in ways.items()}
    medians = _median_seconds(ways, repeats)
    unshared = min("packed", "padded", key=medians.__getitem__)
    result = {
        "prompt": case.prompt,
        "response": case.response,
        "group": case.group,
        "token_ratio": round(case.token_ratio, 3),
        "speedup": round(medians[unshared] / medians["shared"], 3),
        "speedup_chunked": round(medians["chunked"] / medians["shared"], 3),
        **{f"{name}_s": round(value, 4) for name, value in medians.items()},
        "peak_bytes_shared": peaks["shared"],
        "peak_bytes_unshared": peaks[unshared],
        "peak_bytes_chunked": peaks["chunked"],
    }
    say(f"{result}")
    return result


def _median_seconds(ways: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for i in range(repeats):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            started = time.process_time()
            ways[name]()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _peak_bytes(model: SharedPromptGPT, way: Callable[[], None]) -> int:
    """Peak bytes of one run, which also serves as warm-up. Gradients of the weights are allocated before."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return allocated(way).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_prompt", description="Shared against unshared.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every way (default: %(default)s)")
    parser.add_argument("--case", nargs=3, type=int, metavar=("P", "R", "G"), help="only this case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(SHAPE, init_parallel(choose_device("cpu"), 0, TrainerSection()))
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    cases = [options.case] if options.case else CASES
    print(json.dumps({"cases": [measure(model, Case(*case), options.repeats, say) for case in cases]}))


if __name__ == "__main__":
    main()
