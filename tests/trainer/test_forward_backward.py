"""Micro-batches of several groups, long groups in two stages, recomputation: forward and all gradients are exact."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.checks.preflight.model import read_shape
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from trainer.batching.group_slice import GroupSlice, slices_of
from trainer.batching.packing import pack
from trainer.batching.shared_prompt import make_micro_batch
from trainer.forward_backward import PackedPass, TwoStagePass, make_passes
from trainer.hf.weight_export import WeightExport
from trainer.hf.weights import load_hf_weights
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.parallel import Parallel

TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5}
TEMPERATURE = 0.7


class Policy(torch.nn.Module):
    """Stands for Megatron's DDP, whose gradient buffers are float32."""

    def __init__(self, module: SharedPromptGPT) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: object) -> object:
        return self.module(*arguments)


def weighted(logprobs_N: torch.Tensor, start: int) -> torch.Tensor:
    """A loss that gives every token a weight of its own."""
    places = torch.arange(start, start + len(logprobs_N), dtype=logprobs_N.dtype)
    return (logprobs_N * torch.sin(1.0 + places)).sum()


Reference = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs of all response tokens, and the gradients of their weighted sum."""


def in_transformers(path: Path, groups: Sequence[Group]) -> Reference:
    """Every sample run alone; transformers' norms are float32, whatever the model's dtype."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    logprobs = []
    for group in groups:
        for response in group.responses:
            tokens = torch.tensor([[*group.prompt.token_ids, *response.token_ids]])
            logits = model(tokens, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1] / TEMPERATURE
            logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(response.token_ids)[:, None])[:, 0])
    all_logprobs = torch.cat(logprobs)
    weighted(all_logprobs, 0).backward()
    return all_logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def alone_under_a_dense_mask(path: Path, groups: Sequence[Group], parallel: Parallel) -> Reference:
    """Every sample run alone, in float64 throughout, by plain masked attention and a plain log-softmax."""
    model = load(path, torch.float64, "none", parallel)
    model.kernel = None
    logprobs = []
    for group in groups:
        (whole,) = slices_of([group])
        for i in whole.indices:
            sample = make_micro_batch([GroupSlice(group, whole.prompt, [i])], parallel.device.DEVICE)
            hidden_RH = model.rows_for_logits(model.hidden(sample.rows)).index_select(0, sample.labels.logit_rows_R)
            head_VH = model.shared_embedding_or_output_weight() if model.shape.tied else model.output_layer.weight
            all_RV = (hidden_RH @ head_VH.T / TEMPERATURE).log_softmax(-1)
            logprobs.append(all_RV[sample.labels.label_rows_N, sample.labels.labels_N])
    all_logprobs = torch.cat(logprobs)
    weighted(all_logprobs, 0).backward()
    return all_logprobs.detach(), hf_gradients_of(model)


def load(path: Path, dtype: torch.dtype, recompute: str, parallel: Parallel) -> SharedPromptGPT:
    model = build_model(read_shape(path), dtype, parallel, TrainerSection(recompute=recompute))
    load_hf_weights(model, path)
    return model


def hf_gradients_of(model: SharedPromptGPT) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return {spec.name: gradient for spec, gradient in WeightExport(model).stream()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("max_tokens", [10_000, 20, 6])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("olmo3", False)])
def test_log_probs_and_gradients_equal_unshared_samples(
    family: str,
    tied: bool,
    max_tokens: int,
    recompute: str,
    dtype: torch.dtype,
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    ragged_groups: list[Group],
) -> None:
    path = tiny_model(family, tied=tied)
    model = load(path, dtype, recompute, parallel)
    window = pack(ragged_groups, max_tokens)
    passes = make_passes(window, parallel, TEMPERATURE, max_tokens)
    kinds = {type(a_pass) for a_pass in passes}
    assert kinds == ({PackedPass} if max_tokens == 10_000 else {PackedPass, TwoStagePass})

    seen: list[torch.Tensor] = []

    def loss_of(number: int, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.append(logprobs_N.detach())
        return weighted(logprobs_N, sum(map(len, seen[:-1])))

    for a_pass in passes:
        a_pass.train(Policy(model), loss_of)
    with torch.no_grad():
        frozen = [logprobs for a_pass in passes for logprobs in a_pass.logprobs(model)]

    if dtype == torch.float64:
        expected_logprobs, expected_gradients = alone_under_a_dense_mask(path, ragged_groups, parallel)
    else:
        expected_logprobs, expected_gradients = in_transformers(path, ragged_groups)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(torch.cat(seen).double(), expected_logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat(frozen), torch.cat(seen), rtol=tolerance, atol=tolerance)
    gradients = hf_gradients_of(model)
    assert set(gradients) == set(expected_gradients)
    for name, gradient in gradients.items():
        expected = expected_gradients[name].double()
        error = float((gradient.double() - expected).norm() / expected.norm())
        assert error <= tolerance, f"{name}: {error:.1e}"
