"""Log-probs in chunks, and with the vocabulary shared among ranks, equal a plain log-softmax.

Shape legend: R rows with logits, H hidden size, V vocabulary, N response tokens.
"""

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from async_rl.method.proof.draws import POWERS
from benchmarks.common.memory import allocated
from trainer.batching.shared_prompt import Judged
from trainer.model import logprobs
from trainer.model.logprobs import response_logprobs

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
WORKER = ("-m", "tests.support.trainer.logprobs_worker")


@dataclass(frozen=True)
class Inputs:
    hidden_RH: torch.Tensor
    weight_VH: torch.Tensor
    label_rows_N: torch.Tensor
    labels_N: torch.Tensor
    temperature: float
    dlogprobs_N: torch.Tensor
    judged: Judged

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
        return self.hidden_RH, self.weight_VH, self.label_rows_N, self.labels_N, self.temperature


def make_inputs(rng: random.Random, dtype: torch.dtype) -> Inputs:
    """Several labels in many rows, some of them the same label twice; no label in some rows."""
    num_rows, num_labels, hidden, vocab = rng.randint(1, 20), rng.randint(1, 60), rng.randint(1, 30), rng.randint(2, 40)
    wide = torch.promote_types(dtype, torch.float32)
    label_rows_N = torch.randint(num_rows, (num_labels,))
    rows = sorted(rng.sample(range(num_rows), rng.randint(0, num_rows)))
    order = {row: i for i, row in enumerate(rows)}
    index_N = torch.tensor([order.get(row, -1) for row in label_rows_N.tolist()])
    judged = Judged(tuple(rows), torch.tensor(rows, dtype=torch.int64), index_N)
    return Inputs(
        torch.randn(num_rows, hidden, dtype=torch.float64).to(dtype),
        torch.randn(2 * vocab, hidden, dtype=torch.float64).to(dtype),
        label_rows_N,
        torch.randint(2 * vocab, (num_labels,)),
        rng.choice([0.5, 1.0, 1.7]),
        torch.randn(num_labels, dtype=torch.float64).to(wide),
        judged,
    )


def plain_logprobs(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    label_rows_N: torch.Tensor,
    labels_N: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs_RV = torch.log_softmax(hidden_RH @ weight_VH.T / temperature, dim=-1)
    entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1)
    logprobs_N = logprobs_RV[label_rows_N, labels_N]
    others = [(c * logprobs_RV).log_softmax(-1)[label_rows_N, labels_N] - logprobs_N for c in POWERS]
    return logprobs_N, entropy_R[label_rows_N], torch.stack(others)


def results_of(function: object, inputs: Inputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """Log-probs, entropies, log-ratios and the gradients of hidden rows and weights."""
    hidden_RH, weight_VH, *others = inputs.arguments
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden_RH, weight_VH)]
    options = {"judged": inputs.judged} if function is response_logprobs else {}
    logprobs_N, entropy_N, log_ratios_KN = function(*leaves, *others, **options)  # type: ignore[operator]
    is_judged_N = inputs.judged.index_N >= 0
    if options:
        assert log_ratios_KN[:, ~is_judged_N].isnan().all()
    gradients = torch.autograd.grad(logprobs_N, leaves, inputs.dlogprobs_N.to(logprobs_N.dtype))
    return [logprobs_N.detach(), entropy_N.detach(), log_ratios_KN.detach()[:, is_judged_N], *gradients]


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], limit: float) -> None:
    """Errors at most `limit` of the largest value, or of 1."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        if a.numel():
            assert float((a.to(e.dtype) - e).abs().max()) <= limit * max(1.0, float(e.abs().max()))


@pytest.mark.parametrize("chunk_rows", [1, 3, 10**6])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_equal_plain_log_softmax_in_any_chunks(
    dtype: torch.dtype, limit: float, chunk_rows: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(10):
        inputs = make_inputs(rng, dtype)
        row_bytes = len(inputs.weight_VH) * (8 if dtype == torch.float64 else 4)
        monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_rows * row_bytes)
        actual = results_of(response_logprobs, inputs, dtype)
        if dtype == torch.bfloat16:
            # A logit is rounded relative to its own size, which changes probabilities by so much.
            hidden_RH, weight_VH, *_, temperature = inputs.arguments
            limit = 3e-2 + 2**-8 * float((hidden_RH.double() @ weight_VH.double().T).abs().max()) / temperature
        assert_close(actual, results_of(plain_logprobs, inputs, torch.float64), limit)
        assert [x.dtype for x in actual[3:]] == [dtype, dtype]
        assert {x.dtype for x in actual[:3]} == {torch.promote_types(dtype, torch.float32)}


def test_gradients_are_those_of_finite_differences(rng: random.Random) -> None:
    inputs = make_inputs(rng, torch.float64)
    leaves = (inputs.hidden_RH.requires_grad_(), inputs.weight_VH.requires_grad_())
    assert torch.autograd.gradcheck(lambda *x: response_logprobs(*x, *inputs.arguments[2:])[0], leaves)


def test_without_entropy_the_log_probs_are_the_same_bits(rng: random.Random) -> None:
    inputs = make_inputs(rng, torch.float32)
    expected, *_ = response_logprobs(*inputs.arguments)
    logprobs_N, *others = response_logprobs(*inputs.arguments, with_entropy=False)
    assert others == [None, None] and torch.equal(logprobs_N, expected)


@pytest.mark.parametrize("uses_logprobs", [True, False])
def test_the_entropys_gradient_is_that_of_the_plain_one(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, uses_logprobs: bool
) -> None:
    inputs = make_inputs(rng, torch.float64)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", rng.choice([1, 700, 10**9]))
    weights = torch.randn_like(inputs.dlogprobs_N)
    found = []
    for compute in (response_logprobs, plain_logprobs):
        hidden_RH, weight_VH = (tensor.detach().clone().requires_grad_() for tensor in inputs.arguments[:2])
        logprobs_N, entropy_N, _ = compute(hidden_RH, weight_VH, *inputs.arguments[2:])
        loss = entropy_N @ weights
        if uses_logprobs:
            loss = loss + logprobs_N @ inputs.dlogprobs_N
        found.append(torch.autograd.grad(loss, [hidden_RH, weight_VH]))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


def test_an_entropy_of_certain_tokens_has_a_finite_gradient() -> None:
    hidden_RH = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight_VH = torch.tensor([[1.0], [-1.0], [0.5]])
    _, entropy_N, _ = response_logprobs(hidden_RH, weight_VH, torch.tensor([0, 1]), torch.tensor([0, 0]), 1.0)
    entropy_N.sum().backward()
    assert hidden_RH.grad is not None and hidden_RH.grad.tolist() == [[0.0], [0.0]]


def test_no_labels_have_no_log_probs_and_zero_gradients(rng: random.Random) -> None:
    inputs = make_inputs(rng, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    hidden_RH = inputs.hidden_RH.requires_grad_()
    logprobs_N, entropy_N, _ = response_logprobs(hidden_RH, inputs.weight_VH, none, none, 1.0)
    logprobs_N.sum().backward()
    assert logprobs_N.shape == entropy_N.shape == (0,)
    assert hidden_RH.grad is not None and not hidden_RH.grad.any()


def test_huge_logits_stay_finite() -> None:
    hidden_RH = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight_VH = torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs_N, entropy_N, _ = response_logprobs(hidden_RH, weight_VH, torch.tensor([0, 1]), torch.tensor([0, 0]), 1.0)
    logprobs_N.sum().backward()
    assert logprobs_N.tolist() == [0.0, -2e4]
    assert entropy_N.tolist() == [0.0, 0.0]
    assert hidden_RH.grad is not None and torch.isfinite(hidden_RH.grad).all()


def test_all_logits_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, chunk_bytes = 4, 2**16
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)

    def peak(num_rows: int, vocab: int) -> int:
        hidden_RH, weight_VH = torch.randn(num_rows, hidden, requires_grad=True), torch.randn(vocab, hidden)
        rows_N = torch.arange(num_rows)

        def run() -> None:
            response_logprobs(hidden_RH, weight_VH, rows_N, rows_N, 1.0)[0].sum().backward()

        run()
        return allocated(run).peak_bytes

    num_rows, vocab = 1024, 2048
    small, large = peak(num_rows, vocab), peak(2 * num_rows, 2 * vocab)
    inputs_bytes = 4 * (2 * num_rows + 2 * vocab) * hidden
    # Per-row figures and gradients grow with the inputs; logits, four times as many, would be 32 MiB.
    assert large - small <= 8 * inputs_bytes
    assert large <= 8 * inputs_bytes + 4 * chunk_bytes < 4 * 4 * num_rows * vocab


@pytest.mark.distributed
def test_two_ranks_with_half_of_the_vocabulary_each_equal_one(rng: random.Random, tmp_path: Path) -> None:
    inputs = make_inputs(rng, torch.float64)
    expected = results_of(response_logprobs, inputs, torch.float64)
    torch.save({**vars(inputs), "chunk_bytes": 5 * 8 * len(inputs.weight_VH)}, tmp_path / "inputs.pt")
    subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", *WORKER, tmp_path / "inputs.pt", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    ranks = [torch.load(tmp_path / f"rank{i}.pt") for i in range(2)]
    for results in ranks:
        assert_close([*results[:4]], expected[:4], 1e-11)
    assert_close([torch.cat([results[4] for results in ranks])], expected[4:], 1e-11)


def test_a_row_that_is_not_finite_leaves_the_others_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_RH, weight_VH = torch.randn(4, 6), torch.randn(9, 6)
    hidden_RH[2] = torch.nan
    labels_N = torch.tensor([3, 0, 8, 5])
    # One row in each chunk: the labels of the others are outside it.
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 9 * 4)
    found_N, *_ = logprobs.response_logprobs(hidden_RH, weight_VH, torch.arange(4), labels_N, 1.0)
    assert found_N.isfinite().tolist() == [True, True, False, True]
