"""Checks that need no other weights: how tokens are drawn, where responses end, what a text's tokens are."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from async_rl.method.proof.draws import LIMIT, Draws
from async_rl.method.proof.gap_limits import MIN_TOKENS
from async_rl.records.findings import Finding, fails, holds, not_tested
from trainer.audit.engine import Ask, Engine, Sample
from trainer.audit.exact_model import ExactModel, joined, log_ratios
from trainer.logprob_gaps import sums_of

NUCLEI = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
TOPS = (1, 5, 10, 20, 50, 100)
"""Common values of top_p and top_k."""

NUM_SORTED = 1024
"""Tokens whose whole distribution is sorted, which takes longer than all else."""

NUM_ENDS = 64
"""Responses that are to end: with a probability of 0.35 at the first token, none does in one audit of 10^12."""
END_LENGTH = 4


@dataclass(slots=True)
class Facts:
    """What the checkpoint's distributions say of recorded tokens."""

    logprobs_N: torch.Tensor
    log_ratios_KN: torch.Tensor
    ends: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """The largest probability of an end token within each sample, with the tokens ahead of it."""
    kept: dict[str, float] = field(default_factory=dict)
    """By what may be left out, such as "top_p 0.9": -log of the probability that honest draws are all of what is kept,
    infinite where one was not."""
    logits: dict[Sample, torch.Tensor] = field(default_factory=dict)
    """Ahead of each token, float32 [n, V], of the samples whose logits are to be kept."""


def facts_of(
    exact: ExactModel,
    samples: Sequence[Sample],
    ends: Sequence[int] = (),
    num_sorted: int = 0,
    keeps: Collection[Sample] = (),
) -> Facts:
    """One pass over the samples; the distributions of `num_sorted` tokens are sorted, too, and logits of some kept."""
    logprobs: dict[int, torch.Tensor] = {}
    ratios: dict[int, torch.Tensor] = {}
    found = Facts(torch.empty(0), torch.empty(0))
    kept = dict.fromkeys((*(f"top_p {p:g}" for p in NUCLEI), *(f"top_k {k}" for k in TOPS)), 0.0)
    for i, logits_nV in exact.logits(samples):
        sample = samples[i]
        if sample in keeps:
            # Without the rest of its batch.
            found.logits[sample] = logits_nV.clone()
        logprobs_nV = (logits_nV / sample.temperature).log_softmax(-1)
        drawn_n1 = torch.tensor(sample.tokens, device=logits_nV.device)[:, None]
        own_n = logprobs_nV.gather(1, drawn_n1)[:, 0]
        logprobs[i] = own_n.double().cpu()
        ratios[i] = log_ratios(logprobs_nV, own_n)
        if ends:
            of_ends_n = (logits_nV[:, list(ends)].logsumexp(-1) - logits_nV.logsumexp(-1)).exp()
            place = int(of_ends_n.argmax())
            found.ends.append((float(of_ends_n[place]), (*sample.prompt, *sample.tokens[:place])))
        if num_sorted > 0:
            num_sorted -= len(sample.tokens)
            for name, masses_n in _kept_masses(logprobs_nV, own_n).items():
                kept[name] -= float(masses_n.log().sum())
    found.logprobs_N, found.log_ratios_KN = joined(logprobs), torch.cat([ratios[i] for i in sorted(ratios)], dim=1)
    # A log of 0 is of a token that would not have been drawn: that cannot be what is kept.
    found.kept = {name: total for name, total in kept.items() if math.isfinite(total)}
    return found


def _kept_masses(logprobs_nV: torch.Tensor, own_n: torch.Tensor) -> dict[str, torch.Tensor]:
    """The probability of what each truncation keeps, 0 where it leaves the drawn token out; float64 [n] each."""
    # On a CPU, NumPy sorts several times faster; torch sorts places, too.
    sorted_nV = torch.from_numpy(-np.sort(-logprobs_nV.cpu().numpy(), axis=-1))
    sums_nV = sorted_nV.double().exp_().cumsum(-1)
    # The last of those that are as likely: an engine may keep any of them.
    place_n = (logprobs_nV >= own_n[:, None]).sum(-1).cpu() - 1
    found = {}
    for p in NUCLEI:
        # The last sum may be rounded below 1.
        found[f"top_p {p:g}"] = (sums_nV < p).sum(-1).clamp_(max=sums_nV.shape[-1] - 1) + 1
    for k in TOPS:
        found[f"top_k {k}"] = torch.full_like(place_n, min(k, sums_nV.shape[-1]))
    return {
        name: torch.where(place_n < num_n, sums_nV.gather(1, (num_n - 1)[:, None])[:, 0], 0.0)
        for name, num_n in found.items()
    }


def check_draws(facts: Facts, reported_N: torch.Tensor, temperature: float, likeliest: float | None) -> Finding:
    """Whether tokens came from the distribution whose log-probs came with them.

    Args:
        likeliest: the temperature at which the tokens were most likely drawn, where it is clearly not `temperature`.
    """
    check, bound = f"draws at temperature {temperature:g}", f"log-ratio {LIMIT:.1f}: one in 10^12"
    if len(reported_N) < MIN_TOKENS:
        return not_tested(check, f"{len(reported_N)} tokens, of {MIN_TOKENS} that are needed")
    gaps = sums_of(facts.logprobs_N - reported_N, math.inf, facts.log_ratios_KN)
    draws = Draws()
    draws.add({"the engine": gaps})
    # Each of them is a likelihood ratio of mean 1, and so is their mean.
    cut = max(facts.kept, key=facts.kept.__getitem__, default=None)
    if cut is not None and facts.kept[cut] > LIMIT + math.log(len(NUCLEI) + len(TOPS)):
        shown = f"all drawn tokens are among those that {cut} keeps; honest draws are with a probability of "
        return fails(check, f"{shown}e^-{facts.kept[cut]:.0f}", bound, cause=f"draws cut by {cut}")
    if draws.violations or likeliest is not None:
        at = f" {likeliest:.3g}" if likeliest is not None else ""
        kind = "lower" if gaps.colder_sum > gaps.hotter_sum else "higher"
        shown = draws.violations[0] if draws.violations else f"the tokens are most likely of temperature{at}"
        return fails(check, shown, bound, cause=f"draws at a {kind} temperature than reported")
    return holds(check, f"log-ratio {max(gaps.hotter_sum, gaps.colder_sum):.1f} of {gaps.num_drawn} tokens", bound)


def check_ends(engine: Engine, places: Sequence[tuple[float, tuple[int, ...]]], ends: Sequence[int]) -> Finding:
    """Whether a response ends at an end token, and end tokens are drawn as often as the checkpoint has them.

    Args:
        places: as `Facts.ends`.
    """
    check = "end tokens"
    if not ends:
        return not_tested(check, "the checkpoint names none (eos_token_id)")
    probability, prompt = max(places)
    samples = engine.ask([Ask(prompt, END_LENGTH, ignores_end=False)] * NUM_ENDS)
    passed = [sample for sample in samples if any(token in ends for token in sample.tokens[:-1])]
    if passed:
        tokens = list(passed[0].tokens)
        return fails(check, f"{tokens} goes on after an end token, of {list(ends)}", cause="end token ignored")
    num_ended = sum(sample.finish_reason == "stop" for sample in samples)
    bound = f"none in {NUM_ENDS} with a probability below 10^-12"
    if num_ended:
        return holds(check, f"{num_ended} of {NUM_ENDS} responses end", bound)
    never = NUM_ENDS * math.log1p(-min(probability, 1 - 1e-9))
    if never < -LIMIT:
        shown = f"none of {NUM_ENDS} responses ends, and an end token has probability {probability:.2g} at their first"
        return fails(check, shown, bound, cause="end tokens never drawn")
    return not_tested(check, f"no probe makes an end token likelier than {probability:.2g}")


def check_vocabulary(samples: Iterable[Sample], vocab_size: int) -> Finding:
    """Whether all drawn tokens are the checkpoint's."""
    check, bound = "vocabulary", f"ids below {vocab_size}"
    highest = max((token for sample in samples for token in sample.tokens), default=0)
    if highest >= vocab_size:
        return fails(check, f"token {highest} was drawn", bound, cause="padded vocabulary drawn")
    return holds(check, f"the highest drawn id is {highest}", bound)


def check_text(engine: Engine, text: str, own: Sequence[int], bos: int | None) -> Finding:
    """Whether the engine divides a text as the checkpoint's tokenizer does."""
    theirs = engine.tokens_of(text)
    if theirs is None:
        return not_tested("tokens of a text", "its /v1/completions does not say prompt_token_ids")
    return _compared("tokens of a text", theirs, own, bos, "tokenizer mismatch")


def check_chat(
    engine: Engine, messages: Sequence[dict[str, str]], own: Sequence[int] | None, bos: int | None
) -> Finding:
    """The same of chat messages."""
    if own is None:
        return not_tested("tokens of a chat", "the checkpoint has no chat template")
    theirs = engine.tokens_of_chat(messages)
    if theirs is None:
        return not_tested("tokens of a chat", "it has no /tokenize")
    return _compared("tokens of a chat", theirs, own, bos, "chat template drift")


def _compared(check: str, theirs: Sequence[int], own: Sequence[int], bos: int | None, other: str) -> Finding:
    if list(theirs) == list(own):
        return holds(check, f"the same {len(own)} tokens", "equal")
    cause = other
    if bos is not None and [bos, *own] == list(theirs):
        cause = "BOS added"
    elif bos is not None and list(own) == [bos, *theirs]:
        cause = "BOS missing"
    place = next((i for i, (a, b) in enumerate(zip(theirs, own, strict=False)) if a != b), min(len(theirs), len(own)))
    shown = (
        f"{len(theirs)} tokens for {len(own)}, the first other one at place {place}: {list(theirs[place : place + 4])} "
        f"for {list(own[place : place + 4])}"
    )
    return fails(check, shown, "equal", cause=cause)
