"""The GPU benchmark runs to its end where there is no GPU, and counts what it says it counts."""

import json
import os
import subprocess
from itertools import pairwise

import pytest
import torch

from benchmarks.gpu.__main__ import CASES, Case, make_group, make_micro_batches
from benchmarks.gpu.model import PASSES, SIZES, model_flops, num_pairs
from tests.support import ROOT

CPU = torch.device("cpu")
PARTS = {"layout_s", "layers_forward_s", "layers_backward_s", "attention_s", "logprobs_s", "optimizer_s"}
"""The backward pass is what the others leave of the whole, on a busy machine maybe nothing."""


@pytest.mark.distributed
def test_benchmark_ends_with_its_figures() -> None:
    command = ["make", "bench-gpu", "ARGS=--device cpu --size tiny --repeats 1"]
    # An outer make would have this one announce its directory behind the figures.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout.splitlines()[-1])
    (case,) = figures["cases"]
    assert figures["kernel"] == "CPUAttention"
    assert case["shared_rows"] == 12 + 4 * 5
    assert case["unshared_rows"] == 4 * (12 + 5)
    assert case["mfu"] is None, "a CPU is not in the table of peaks"
    assert min(case["shared_s"], case["unshared_s"], figures["publish"]["publish_s"]) > 0
    assert figures["parts"].keys() == PARTS and all(
        figures["parts"][part] > 0 for part in PARTS - {"layers_backward_s"}
    )
    for step in (figures["step"], figures["step_with_reference"]):
        assert step["step_s"] > 0 and step["micro_batches"] == 4 and step["rows"] == 4 * case["shared_rows"]
    # bf16 weights, each sent once: the embedding is the output layer's too.
    assert figures["publish"]["bytes"] == 2 * figures["parameters"]


def test_groups_of_the_benchmark_have_at_least_8k_rows() -> None:
    for case in CASES["0.6b"]:
        assert case.prompt + case.num_responses * (case.response - 1) >= 8192


def test_unshared_micro_batches_hold_every_sample_with_its_prompt() -> None:
    case = Case(prompt=7, response=4, num_responses=5)
    group = make_group(case, 100)
    (shared,), unshared = (make_micro_batches(group, CPU, shared=shared) for shared in (True, False))
    assert [batch.rows.segments.num_rows for batch in unshared] == [20, 20, 10]
    assert shared.rows.segments.num_rows == 7 + 5 * 3
    labels = torch.cat([batch.labels.labels_N for batch in unshared])
    assert labels.tolist() == shared.labels.labels_N.tolist()


def test_pairs_are_those_of_the_dense_mask() -> None:
    group = make_group(Case(prompt=5, response=4, num_responses=3), 100)
    for shared in (True, False):
        for micro_batch in make_micro_batches(group, CPU, shared=shared):
            assert num_pairs(micro_batch) == int(micro_batch.rows.segments.dense_mask_TS.sum())


def test_flops_grow_linearly_in_rows_and_with_the_pairs() -> None:
    shape = SIZES["tiny"]
    costs = []
    for response in (2, 3, 4, 5):
        (micro_batch,) = make_micro_batches(make_group(Case(6, response, 1), 100), CPU, shared=True)
        pairs = PASSES * shape.num_layers * 4 * shape.num_heads * shape.head_dim * num_pairs(micro_batch)
        costs.append(model_flops(shape, [micro_batch]) - pairs)
    differences = [after - before for before, after in pairwise(costs)]
    # One row more: two operations for each weight, in each of three passes. Norms and the embedding look-up are no
    # products, but the tied embedding is multiplied as the output layer.
    linear = (
        shape.num_layers * shape.hidden_size * (3 * shape.ffn_size + 2 * 16 * (shape.num_heads + shape.num_kv_heads))
    )
    output = shape.vocab_size * shape.hidden_size
    assert differences == [6 * (linear + output)] * 3
