"""Checks of an algorithm on random groups, for its tests: what the trainer relies on, and cannot notice by itself.

    check_algorithm(MyAlgorithm(AlgorithmSection(kl_coef=0.1), 16), max_response_tokens=16)

Most important is that a batch's loss and gradient do not depend on how its groups were cut into micro-batches, and in
which order these came: in a run both follow from what finished first.

Shape legend: G rollouts of one group, or responses of a micro-batch; N sampled tokens of responses.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from async_rl.errors import RewardError
from async_rl.method.algorithms.base import Algorithm, Responses, Tokens, Totals, added
from async_rl.method.algorithms.random_groups import Draw, RandomGroup, any_reward, random_batch, tokens_of

NUM_SPLITS = 4
TOLERANCE = 1e-9
"""In float64, relative to the largest of the numbers that were summed: far above rounding, far below any error."""


Place = tuple[int, int]
"""(group, response)."""

REWARDS: dict[str, Draw] = {
    "several": lambda rng: rng.choice((0.0, 0.25, 1.0)),
    "any": any_reward,
    "negative": lambda rng: rng.choice((-1.0, 0.0, 0.5)),
    "zero": lambda rng: 0.0,
    "equal": lambda rng: 0.1,
    "tiny": lambda rng: 1e-30 * rng.random(),
    "huge": lambda rng: 1e30 * rng.uniform(-1.0, 1.0),
}
ORDINARY = ("several", "any")
"""Rewards that no algorithm may refuse; it may raise a `RewardError` for the others, and must be finite otherwise."""


def check_algorithm(
    algorithm: Algorithm,
    *,
    max_response_tokens: int,
    parts: Sequence[str] = (),
    num_batches: int = 10,
    seed: int | None = None,
) -> None:
    """Checks an algorithm on random batches of each kind of `REWARDS`.

    Args:
        max_response_tokens: what the algorithm was made with; rollouts have at most so many tokens.
        parts: names of parts of the reward; without them rewards have none.
        seed: repeats the batches of an earlier call, whose failure names it.

    Raises:
        AssertionError: the algorithm is not what the trainer needs; says what differs, and the seed.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    rng = random.Random(seed)
    for kind, draw in REWARDS.items():
        for _ in range(num_batches):
            batch = random_batch(rng, algorithm.needs, draw, max_response_tokens=max_response_tokens, parts=parts)
            try:
                _check_batch(algorithm, batch, rng, in_float64=kind in ORDINARY)
            except RewardError as error:
                assert kind not in ORDINARY, f"{kind} rewards are refused (seed {seed}): {error}"
            except AssertionError as error:
                raise AssertionError(f"with {kind} rewards, seed {seed}: {error}") from error


def totals_of(algorithm: Algorithm, batch: Sequence[RandomGroup], *, with_kl: bool = True) -> Totals:
    """What the trainer adds up; before the first advantage no KL is known."""
    return added(algorithm.sums(each.rollouts if with_kl else replace(each.rollouts, kl=None)) for each in batch)


def loss_and_gradient(
    algorithm: Algorithm, batch: Sequence[RandomGroup], micro_batches: Sequence[Sequence[Place]]
) -> tuple[float, list[torch.Tensor]]:
    """The batch's loss, and the gradients of log-probs and entropies of each response, after the division."""
    totals = totals_of(algorithm, batch, with_kl=False) if algorithm.needs.totals else None
    of_groups = [(algorithm.advantages(g.rollouts, totals), algorithm.weights(g.rollouts)) for g in batch]
    denominator = algorithm.denominator(totals_of(algorithm, batch)) or 1.0
    leaves = [
        leaf for group in batch for _, tokens in group.responses for leaf in (tokens.logprobs_N, tokens.entropy_N)
    ]
    loss, gradients = 0.0, [torch.zeros_like(leaf) for leaf in leaves]
    for places in micro_batches:
        tokens, responses = _micro_batch(batch, of_groups, places)
        before = _copies(tokens)
        found = algorithm.loss_sum(tokens, responses).loss
        assert found.dim() == 0 and found.requires_grad, f"the loss is {found}: expected a sum with a gradient"
        for name, value in _copies(tokens).items():
            assert torch.equal(value, before[name]), f"loss_sum() changes the {name} that it was given"
        loss += float(found.detach()) / denominator
        for total, own in zip(gradients, torch.autograd.grad(found, leaves, allow_unused=True), strict=True):
            if own is not None:
                total += own / denominator
    return loss, gradients


def whole(batch: Sequence[RandomGroup]) -> list[list[Place]]:
    """All in one micro-batch."""
    return [[(g, r) for g, group in enumerate(batch) for r in range(len(group.responses))]]


def _check_batch(algorithm: Algorithm, batch: list[RandomGroup], rng: random.Random, in_float64: bool) -> None:
    dtype = torch.float64 if in_float64 else torch.float32
    batch = [group.to(dtype) for group in batch]
    _check_numbers(algorithm, batch)
    loss, gradients = loss_and_gradient(algorithm, batch, whole(batch))
    assert math.isfinite(loss), f"the loss is {loss}"
    assert all(bool(gradient.isfinite().all()) for gradient in gradients), "a gradient is not finite"
    assert loss_and_gradient(algorithm, batch, [[]])[0] == 0.0, "a micro-batch without responses has a loss"
    by_group = iter(gradients)
    for number, group in enumerate(batch):
        own = [next(by_group) for _ in range(2 * len(group.responses))]
        if not algorithm.has_gradient(replace(group.rollouts, kl=None)):
            assert not any(bool(gradient.any()) for gradient in own), (
                f"has_gradient of group {number} is False, but it has one: {group.rollouts}"
            )
    if in_float64:
        for _ in range(NUM_SPLITS):
            _check_split(algorithm, batch, _random_split(rng, batch, algorithm.needs.whole_groups), loss, gradients)


def _check_numbers(algorithm: Algorithm, batch: Sequence[RandomGroup]) -> None:
    """What is computed of whole groups."""
    names = {frozenset(algorithm.sums(group.rollouts)) for group in batch}
    assert len(names) == 1, f"sums() has other names in other groups: {[sorted(some) for some in names]}"
    totals = totals_of(algorithm, batch)
    assert all(math.isfinite(value) for value in totals.values()), f"sums() are not finite: {dict(totals)}"
    denominator = algorithm.denominator(totals)
    assert math.isfinite(denominator) and denominator >= 0, f"denominator() is {denominator}"
    before = totals_of(algorithm, batch, with_kl=False) if algorithm.needs.totals else None
    for group in batch:
        for what, values_G in (
            ("advantages()", algorithm.advantages(group.rollouts, before)),
            ("weights()", algorithm.weights(group.rollouts)),
        ):
            assert values_G.shape == (len(group.rollouts.rewards),) and values_G.dtype == torch.float64, (
                f"{what} is {values_G.dtype} of shape {tuple(values_G.shape)}: expected float64, one per rollout"
            )
            assert bool(values_G.float().isfinite().all()), f"{what} is not finite in float32: {values_G.tolist()}"
        assert bool((algorithm.weights(group.rollouts) >= 0).all()), "a weight is negative"
        for _, tokens in group.responses:
            gaps_N = (tokens.old_logprobs_N - _or_zeros(tokens.rollout_logprobs_N, tokens)).double()
            assert 0 <= algorithm.num_corrected(gaps_N) <= len(tokens), "num_corrected() is no number of its tokens"


def _check_split(
    algorithm: Algorithm,
    batch: Sequence[RandomGroup],
    micro_batches: Sequence[Sequence[Place]],
    loss: float,
    gradients: Sequence[torch.Tensor],
) -> None:
    split_loss, split_gradients = loss_and_gradient(algorithm, batch, micro_batches)
    scale = 1.0 + max(float(gradient.abs().max()) for gradient in gradients)
    assert abs(split_loss - loss) <= TOLERANCE * (scale + abs(loss)), (
        f"the loss is {loss} in one micro-batch, and {split_loss} in {list(micro_batches)}"
    )
    for ours, theirs in zip(gradients, split_gradients, strict=True):
        assert float((ours - theirs).abs().max()) <= TOLERANCE * scale, (
            f"a response's gradient is {ours.tolist()} in one micro-batch, {theirs.tolist()} in {list(micro_batches)}"
        )


def _random_split(rng: random.Random, batch: Sequence[RandomGroup], whole_groups: bool) -> list[list[Place]]:
    (places,) = whole(batch)
    rng.shuffle(places)
    number = {place: rng.randrange(4) for place in places}
    if whole_groups:
        number = {(g, r): number[g, 0] for g, r in places}
    return [[place for place in places if number[place] == n] for n in range(4) if n in number.values()]


def _micro_batch(
    batch: Sequence[RandomGroup], of_groups: Sequence[tuple[torch.Tensor, torch.Tensor]], places: Sequence[Place]
) -> tuple[Tokens, Responses]:
    """Some responses, as the trainer gives them to an algorithm."""
    found = [batch[g].responses[r] for g, r in places]
    empty = _first_tokens(batch)
    tokens = tokens_of(lambda name: _joined([getattr(own, name) for _, own in found], getattr(empty, name)))
    like = tokens.logprobs_N
    numbers = {g: number for number, g in enumerate(dict.fromkeys(g for g, _ in places))}
    rollouts = [(g, rollout) for (g, _), (rollout, _) in zip(places, found, strict=True)]
    advantages_G, weights_G = (like.new_tensor([float(of_groups[g][i][k]) for g, k in rollouts]) for i in (0, 1))
    return tokens, Responses(
        advantages_G,
        weights_G,
        torch.tensor([len(own) for _, own in found], dtype=torch.int64),
        torch.tensor([batch[g].rollouts.lengths[k] for g, k in rollouts], dtype=torch.int64),
        torch.tensor([numbers[g] for g, _ in places], dtype=torch.int64),
    )


def _copies(tokens: Tokens) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(tokens, field.name) for field in fields(Tokens)}
    return {name: value.detach().clone() for name, value in values.items() if value is not None}


def _joined(parts: Sequence[torch.Tensor | None], like: torch.Tensor | None) -> torch.Tensor | None:
    if like is None:
        return None
    return torch.cat([like[:0], *(part for part in parts if part is not None)])


def _first_tokens(batch: Sequence[RandomGroup]) -> Tokens:
    return batch[0].responses[0][1]


def _or_zeros(values_N: torch.Tensor | None, like: Tokens) -> torch.Tensor:
    return torch.zeros_like(like.old_logprobs_N) if values_N is None else values_N
