"""Memory and traffic of one long response where ranks share its rows, or its tensors.

    python -m benchmarks.long_context --json [--tokens N] [--ranks 1,2,4] [--recompute full] [--without-products]
    python -m benchmarks.long_context --json [--tokens N] --pieces

A random model of `LAYERS` layers accumulates one group: a short prompt, a response of N tokens and a short one. Each
form runs in processes of its own: alone, `trainer.context_parallel`, and `trainer.tensor_parallel`. The last line is a
JSON list with an object per form:

- `peak_bytes`: the largest rank's peak of tensors above those of weights and gradients, counted from the allocator's
  own events. What libraries take outside of tensors is not in it. With `--without-products` attention returns zeros in
  place of its products, which are quadratic in N and slow on a CPU; the tensors are the same.
- `sent_bytes_per_layer`: what a rank sends of a layer, forward and backward, without recomputation: counted at each
  collective of `LAYERS` and `LAYERS` + 1 layers, with the traffic of a ring for gathers and sums; `formula_bytes` is
  what docs/long_context.md says.
- `seconds`: of one window, with all ranks on this machine.

With `--pieces` two replicas train one group of `PIECES_OF` responses with N tokens together: one of them the whole
group, and both a half, in turn. `seconds` are the least of `REPEATS`, `cpu_s` the least of the slower replica's
processor, which other programs of the machine do not lengthen.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.pieces import cut
from async_rl.method.types import Group
from benchmarks.common.memory import allocated
from benchmarks.common.random_group import random_group
from benchmarks.common.random_model import save_random_qwen3
from trainer.devices import choose_device
from trainer.devices.attention_part import Part
from trainer.parallel import Parallel, init_parallel
from trainer.trainer import MegatronTrainer

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 128, 4, 2, 16, 128
"""Two key / value heads, so that four ranks share them."""
PROMPT_TOKENS, SHORT_TOKENS = 64, 16
SHORT_WINDOW = 2048
"""Response tokens of the windows in which bytes are counted: they are proportional to its rows."""
FLOAT_BYTES = 4
PIECES, PIECES_OF, REPEATS = "pieces", 8, 5

Traffic = Callable[[int, int, int], int]
"""(bytes in, bytes out, ranks) of a collective -> bytes that a rank sends."""
TRAFFIC: dict[str, Traffic] = {
    "alltoall_base_": lambda given, _, ranks: given * (ranks - 1) // ranks,
    "_allgather_base_": lambda given, _, ranks: given * (ranks - 1),
    "_reduce_scatter_base_": lambda _, made, ranks: made * (ranks - 1),
    "allreduce_": lambda given, _, ranks: 2 * given * (ranks - 1) // ranks,
}


class Sent(TorchDispatchMode):
    """Counts what this rank sends in collectives inside the context, in which all ranks of the program take part."""

    def __init__(self, num_ranks: int) -> None:
        # Untyped in torch.
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._num_ranks = num_ranks

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op.namespace == "c10d":
            traffic = TRAFFIC[op.overloadpacket.__name__]
            of_both = isinstance(args[1], torch.Tensor)
            made, given = args[:2] if of_both else (args[0][0], args[0][0])
            self.num_bytes += traffic(given.nbytes, made.nbytes, self._num_ranks)
        return op(*args, **kwargs or {})


def formula_bytes(form: str, ranks: int, num_rows: int) -> int:
    """What a rank sends of a layer with `num_rows` rows in all, forward and backward (docs/long_context.md)."""
    if ranks == 1:
        return 0
    if form == "tensor_parallel":
        # Two gathers and two sums forward, the same backward, and two gathers for the weights' gradients.
        return (ranks - 1) * num_rows // ranks * 10 * HIDDEN * FLOAT_BYTES
    values = 2 * (2 * HEADS + 2 * max(KV_HEADS, ranks)) * HEAD_DIM
    return (ranks - 1) * (num_rows // ranks) * values * FLOAT_BYTES // ranks


def make_group(num_tokens: int) -> Group:
    """A long response and a short one, with different rewards."""
    torch.manual_seed(0)
    group = random_group(PROMPT_TOKENS, num_tokens, 2, VOCAB)
    long, short = group.responses
    cut = replace(short, token_ids=short.token_ids[:SHORT_TOKENS], logprobs=short.logprobs[:SHORT_TOKENS])
    return replace(group, responses=(long, cut), rollouts=())


def save_models(directory: Path) -> None:
    """One for each number of layers, under it."""
    for num_layers in (LAYERS, LAYERS + 1):
        save_random_qwen3(
            directory / str(num_layers),
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=num_layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
        )


def make_trainer(parallel: Parallel, section: TrainerSection, model: Path) -> MegatronTrainer:
    sections = (RolloutSection(), AlgorithmSection(kl_coef=0.0), OptimizerSection(), TrainSection(iterations=1))
    return MegatronTrainer(parallel, section, ModelSection(path=str(model), dtype="float32"), *sections)


class NoProducts:
    """An attention kernel that makes the tensors of one, without their values."""

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros: output [M, H, D], log-sum-exp [H, M]."""
        num_rows, num_heads, _ = query_MHD.shape
        return torch.zeros(query_MHD.shape), torch.zeros(num_heads, num_rows)

    def backward(
        self,
        dout_MHD: torch.Tensor,
        query_MHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        part: Part,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zeros of the inputs' shapes."""
        query, key, value = (torch.zeros(tensor.shape) for tensor in (query_MHD, key_SKD, value_SKD))
        return query, key, value


def measure(form: str, num_tokens: int, recompute: str, models: Path, *, with_products: bool) -> dict[str, Any]:
    """One rank of a form; all ranks of it call it."""
    ranks = int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {form: ranks, "micro_batch_tokens": 2**30}
    section = TrainerSection(**options, recompute=recompute)
    parallel = init_parallel(choose_device("cpu"), 0, section)
    without = section.model_copy(update={"recompute": "none"})
    counted = []
    for num_layers in (LAYERS, LAYERS + 1):
        trainer = make_trainer(parallel, without, models / str(num_layers))
        with Sent(ranks) as sent:
            trainer.accumulate([[make_group(SHORT_WINDOW)]])
        counted.append(sent.num_bytes)
    trainer = make_trainer(parallel, section, models / str(LAYERS))
    if not with_products:
        trainer.models.policy_model.kernel = NoProducts()
    group, started = make_group(num_tokens), time.perf_counter()
    peak = allocated(lambda: trainer.accumulate([[group]])).peak_bytes
    seconds = time.perf_counter() - started
    num_rows = -(-(PROMPT_TOKENS + SHORT_WINDOW - 1 + SHORT_TOKENS - 1) // ranks) * ranks
    result = {
        "form": form if ranks > 1 else "one rank",
        "ranks": ranks,
        "tokens": num_tokens,
        "recompute": recompute,
        "with_products": with_products,
        "peak_bytes": max(parallel.gather_json(peak)),
        "sent_bytes_per_layer": max(parallel.gather_json(counted[1] - counted[0])),
        "formula_bytes": formula_bytes(form, ranks, num_rows),
        "seconds": round(seconds, 1),
    }
    parallel.close()
    return result


def measure_pieces(num_tokens: int, models: Path) -> dict[str, Any]:
    """One rank of two, each of which is a replica."""
    section = TrainerSection(micro_batch_tokens=num_tokens // PIECES_OF * 2)
    parallel = init_parallel(choose_device("cpu"), 0, section)
    trainer = make_trainer(parallel, section, models / str(LAYERS))
    torch.manual_seed(0)
    group = random_group(PROMPT_TOKENS, num_tokens // PIECES_OF, PIECES_OF, VOCAB)
    halves = cut(group, PIECES_OF // 2)
    own = {"whole": [[group], []][parallel.dp_rank], PIECES: [halves[parallel.dp_rank]]}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in own}
    for way in list(own) * REPEATS:
        parallel.gather_json(None)
        began, began_cpu = time.perf_counter(), time.process_time()
        if own[way]:
            trainer.accumulate([own[way]])
        cpu_s = max(parallel.gather_json(time.process_time() - began_cpu))
        found[way].append((time.perf_counter() - began, cpu_s))
        trainer.discard()
    parallel.close()
    least = {way: tuple(map(min, zip(*times, strict=True))) for way, times in found.items()}
    return {
        "form": PIECES,
        "tokens": num_tokens,
        "seconds": {way: round(seconds, 2) for way, (seconds, _) in least.items()},
        "cpu_s": {way: round(cpu_s, 2) for way, (_, cpu_s) in least.items()},
    }


def measure_all(forms: list[tuple[str, int]], options: list[str]) -> Iterator[dict[str, Any]]:
    """Each form and number of ranks in its own processes, one after the other; `options` of this program go to each."""
    with tempfile.TemporaryDirectory() as models:
        save_models(Path(models))
        for form, number in forms:
            # Above the number of key / value heads tensor-parallel ranks gather more.
            if form == "tensor_parallel" and not 1 < number <= KV_HEADS:
                continue
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
            worker = ["-m", "benchmarks.long_context", "--form", form, "--models", models]
            done = subprocess.run([*torchrun, *worker, *options], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{form} on {number} ranks: status {done.returncode}\n{done.stderr[-4000:]}")
            yield json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_context")
    parser.add_argument("--json", action="store_true", help="as the other benchmarks have it; nothing else is printed")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the long response (default: %(default)s)")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--pieces", action="store_true", help="one long group on two replicas, whole and in pieces")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without-products", action="store_true", help="zeros in place of attention's products")
    options = parser.parse_args()
    if options.form == PIECES:
        result = measure_pieces(options.tokens, options.models)
        if os.environ["RANK"] == "0":
            print(json.dumps(result))
        return
    if options.form is not None:
        others = (options.tokens, options.recompute, options.models)
        result = measure(options.form, *others, with_products=not options.without_products)
        if os.environ["RANK"] == "0":
            print(json.dumps(result))
        return
    ranks = [int(number) for number in options.ranks.split(",")]
    forms = [(form, number) for number in ranks for form in ("context_parallel", "tensor_parallel")]
    print(json.dumps(list(measure_all([(PIECES, 2)] if options.pieces else forms, sys.argv[1:]))))


if __name__ == "__main__":
    main()
