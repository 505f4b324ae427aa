"""A group in two stages has the log-probs and gradients of its samples computed unshared and alone.

Shape legend: T rows, H hidden size, V vocabulary, L tokens of one sample.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from async_rl.method.types import Group
from tests.support.groups import random_group
from trainer.attention.prompt_cache import PromptCache
from trainer.attention.shared_attention import shared_prompt_attention
from trainer.batching.group_slice import slices_of, split_slice
from trainer.batching.shared_prompt import Rows, RowShare, make_micro_batch, make_micro_group, make_prompt_rows
from trainer.devices import choose_device
from trainer.model.logprobs import response_logprobs

CPU = torch.device("cpu")
VOCAB_SIZE, HIDDEN, HEADS, HEAD_DIM, LAYERS = 50, 24, (4, 2, 2), 8, 3


class Stack:
    """Attention layers with residuals in float64, on rows in the shared layout or on one sample alone."""

    def __init__(self, recompute: bool = False) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return (0.3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()

        self.tokens_VH, self.positions_LH, self.head_VH = (weight(n, HIDDEN) for n in (VOCAB_SIZE, 100, VOCAB_SIZE))
        self.qkv = [weight(HIDDEN, sum(HEADS) * HEAD_DIM) for _ in range(LAYERS)]
        self.out = [weight(HEADS[0] * HEAD_DIM, HIDDEN) for _ in range(LAYERS)]
        self._recompute = recompute

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.tokens_VH, self.positions_LH, self.head_VH, *self.qkv, *self.out]

    def hidden(self, rows: Rows, cache: PromptCache | None = None) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if cache is not None:
                k, v = cache.extend(layer, k, v)
            return shared_prompt_attention(q, k, v, rows.segments, 0.3, choose_device("cpu").ATTENTION)

        return self._layers(rows.tokens_T, rows.positions_T, attend)

    def sample_logprobs(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
        """Log-probs of one response, by plain causal attention."""

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.repeat_interleave(HEADS[0] // HEADS[1], 1) for x in (k, v))
            scores_HLL = torch.einsum("ihd,jhd->hij", q, k) * 0.3
            hidden_LL = torch.ones(scores_HLL.shape[1:], dtype=torch.bool).triu(1)
            return torch.einsum("hij,jhd->ihd", scores_HLL.masked_fill(hidden_LL, -torch.inf).softmax(-1), v)

        tokens_L = torch.tensor([*prompt, *response])
        hidden_LH = self._layers(tokens_L[:-1], torch.arange(len(tokens_L) - 1), attend)[len(prompt) - 1 :]
        return (hidden_LH @ self.head_VH.T).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    def _layers(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        def layer(number: int, hidden_TH: torch.Tensor) -> torch.Tensor:
            qkv = (hidden_TH @ self.qkv[number]).unflatten(1, (-1, HEAD_DIM)).split(HEADS, 1)
            return hidden_TH + attend(number, *qkv).flatten(1) @ self.out[number]

        hidden_TH = self.tokens_VH[tokens_T] + self.positions_LH[positions_T]
        for number in range(LAYERS):
            # Megatron's recomputation is of the reentrant kind.
            again = self._recompute and torch.is_grad_enabled()
            hidden_TH = checkpoint(layer, number, hidden_TH, use_reentrant=True) if again else layer(number, hidden_TH)
        return hidden_TH


def ragged_group(rng: random.Random) -> Group:
    lens = [rng.randint(1, 9) for _ in range(rng.randint(1, 7))]
    return random_group(0, rng.randint(1, 12), lens, rng, VOCAB_SIZE)


def in_two_stages(
    stack: Stack, group: Group, most: int, multiple_of: int, cache: PromptCache
) -> Iterator[torch.Tensor]:
    """Log-probs of the tokens of each micro-group."""
    num_prompt = len(group.prompt.token_ids)
    prompt_TH = stack.hidden(make_prompt_rows(slices_of([group])[0], CPU, RowShare(multiple_of)), cache)
    cache.begin_responses(prompt_TH[num_prompt - 1 : num_prompt])
    (whole,) = slices_of([group])
    for part in split_slice(whole, most, with_prompt=False):
        micro_group = make_micro_group(part, CPU, RowShare(multiple_of))
        labels = micro_group.labels
        rows_RH = torch.cat([cache.last_row(), stack.hidden(micro_group.rows, cache)])[labels.logit_rows_R]
        yield response_logprobs(rows_RH, stack.head_VH, labels.label_rows_N, labels.labels_N, 1.0)[0]


def gradients(stack: Stack) -> list[torch.Tensor]:
    """What has been added up, which is dropped."""
    taken = [weight.grad for weight in stack.weights]
    for weight in stack.weights:
        weight.grad = None
    return [grad for grad in taken if grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_two_stages_equal_unshared_samples(recompute: bool, multiple_of: int, rng: random.Random) -> None:
    for _ in range(5):
        stack, group, cache = Stack(recompute), ragged_group(rng), PromptCache()
        weights = torch.randn(group.num_response_tokens, dtype=torch.float64)
        logprobs: list[torch.Tensor] = []
        for part in in_two_stages(stack, group, rng.randint(1, 40), multiple_of, cache):
            start = sum(map(len, logprobs))
            (part * weights[start : start + len(part)]).sum().backward()
            logprobs.append(part.detach())
        cache.backward()
        staged = gradients(stack)

        expected = torch.cat([stack.sample_logprobs(group.prompt.token_ids, r.token_ids) for r in group.responses])
        (expected * weights).sum().backward()
        torch.testing.assert_close(torch.cat(logprobs), expected.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(staged, gradients(stack), rtol=1e-9, atol=1e-10)


def test_one_micro_batch_of_several_groups_equals_unshared_samples(rng: random.Random) -> None:
    stack, groups = Stack(), [ragged_group(rng) for _ in range(4)]
    batch = make_micro_batch(slices_of(groups), CPU, RowShare(4))
    weights = torch.randn(len(batch.labels.labels_N), dtype=torch.float64)
    rows_RH = stack.hidden(batch.rows)[batch.labels.logit_rows_R]
    labels = batch.labels
    logprobs, *_ = response_logprobs(rows_RH, stack.head_VH, labels.label_rows_N, labels.labels_N, 1.0)
    (logprobs * weights).sum().backward()
    shared = gradients(stack)

    samples = [(group.prompt.token_ids, r.token_ids) for group in groups for r in group.responses]
    expected = torch.cat([stack.sample_logprobs(*sample) for sample in samples])
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(shared, gradients(stack), rtol=1e-9, atol=1e-10)


def test_log_probs_alone_need_no_gradients(rng: random.Random) -> None:
    stack, group = Stack(), ragged_group(rng)
    with torch.no_grad():
        logprobs = torch.cat(list(in_two_stages(stack, group, 20, 1, PromptCache())))
        expected = torch.cat([stack.sample_logprobs(group.prompt.token_ids, r.token_ids) for r in group.responses])
    torch.testing.assert_close(logprobs, expected, rtol=1e-11, atol=1e-11)


def test_gradients_of_hundreds_of_micro_groups_add_up_in_float32(rng: random.Random) -> None:
    """Each is one rounding of bfloat16, 2^-8, away from the sum in float64, not one for every micro-group."""
    num_groups, num_rows = 400, 3
    made_PKD = torch.randn(num_rows, 2, 4).bfloat16().requires_grad_()
    hidden_PH = torch.randn(num_rows, 8).bfloat16().requires_grad_()
    cache = PromptCache()
    key_PKD, _ = cache.extend(0, made_PKD, made_PKD.detach())
    cache.begin_responses(hidden_PH[-1:] + 0 * key_PKD.sum())
    sums = torch.zeros(num_rows, 2, 4, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64)
    sizes = [torch.zeros_like(total) for total in sums]
    for _ in range(num_groups):
        own_TKD = torch.randn(5, 2, 4).bfloat16().requires_grad_()
        keys_SKD, _ = cache.extend(0, own_TKD, own_TKD.detach())
        # Of one sign: what a sum in bfloat16 stops to notice.
        weights = torch.rand(num_rows, 2, 4).bfloat16(), torch.rand(1, 8).bfloat16()
        loss = (keys_SKD[:num_rows] * weights[0]).sum() + (cache.last_row() * weights[1]).sum()
        loss.backward()
        for total, size, weight in zip(sums, sizes, weights, strict=True):
            total += weight.double()
            size += weight.double().abs()
    cache.backward()
    for grad, total, size in zip((made_PKD.grad, hidden_PH.grad[-1:]), sums, sizes, strict=True):
        allowed = 2.0**-8 * total.abs() + num_groups * 2.0**-24 * size
        assert ((grad.double() - total).abs() <= allowed).all()
