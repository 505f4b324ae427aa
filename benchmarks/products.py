"""Matrix products in float32 on a CPU by MKL and by oneDNN, in turn, one thread: where oneDNN is faster.

    python -m benchmarks.products --json [--rounds N]

The last line is one JSON object: `ratio.OUTPUTSxINPUTS.ROWS`, the best time of MKL over oneDNN's for that many
rows times a weight (`async_rl/cpu/products.py` has the limit that was drawn from it); and `two_cores`, how many
products two processes compute together on two cores, over what one computes alone: 2 on two cores, about 1 where both
are threads of the same core. No overlap of computing processes can be faster than that.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.cpu.products import has_onednn

WEIGHTS = ((320, 192), (192, 576), (1024, 512), (2816, 512), (16384, 512))
ROWS = (16, 64, 128, 256, 1024, 4096)
OPERATIONS_PER_TURN = 2e8
SECONDS_ON_CORES = 2.0


def ratio(num_rows: int, num_outputs: int, num_inputs: int, rounds: int) -> float:
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    linear = torch.ops.mkldnn._linear_pointwise
    products: tuple[Callable[[], object], ...] = (
        lambda: x @ weight.T,
        lambda: linear(x, weight, None, "none", [], ""),
    )
    repeats = max(1, int(OPERATIONS_PER_TURN / (2 * x.numel() * num_outputs)))
    best = [float("inf")] * 2
    for round_number in range(rounds + 1):
        for i, product in enumerate(products):
            started = time.perf_counter()
            for _ in range(repeats):
                product()
            # The first round makes oneDNN's kernels.
            if round_number:
                best[i] = min(best[i], time.perf_counter() - started)
    return best[0] / best[1]


def products_per_s(core: int) -> float:
    """How many products of two matrices of one megabyte each a process on this core computes."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    begun, num_products = time.monotonic(), 0
    while time.monotonic() - begun < SECONDS_ON_CORES:
        left @ right
        num_products += 1
    return num_products / SECONDS_ON_CORES


def two_cores() -> float:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        (alone,) = pool.map(products_per_s, [first])
        together = pool.map(products_per_s, [first, second], chunksize=1)
    return sum(together) / alone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description="MKL against oneDNN.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object to standard output")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each that count (default: %(default)s)")
    options = parser.parse_args()
    if not has_onednn():
        parser.error("this processor has no AVX-512, or torch no oneDNN: async-rl uses torch's own products here")
    torch.set_num_threads(1)
    found = {
        f"ratio.{num_outputs}x{num_inputs}.{num_rows}": round(
            ratio(num_rows, num_outputs, num_inputs, options.rounds), 2
        )
        for num_outputs, num_inputs in WEIGHTS
        for num_rows in ROWS
    }
    if len(os.sched_getaffinity(0)) > 1:
        found["two_cores"] = round(two_cores(), 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
