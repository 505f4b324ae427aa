"""Matrix products in float32 on a CPU by MKL and by oneDNN, in turn, one thread: where oneDNN is faster.

    python -m benchmarks.products --json [--rounds N]

The last line is one JSON object: `ratio.OUTPUTSxINPUTS.ROWS`, the best time of MKL over oneDNN's for that many
rows times a weight. `async_rl/cpu/products.py` has the limits that were drawn from it.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.cpu.products import has_onednn

WEIGHTS = ((320, 192), (192, 576), (1024, 512), (2816, 512), (16384, 512))
ROWS = (16, 64, 128, 256, 1024, 4096)
OPERATIONS_PER_TURN = 2e8


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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
