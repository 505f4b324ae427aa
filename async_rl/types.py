"""Types that all packages share: prompts, responses, groups, batches and the result of a publish.

All are frozen dataclasses without behaviour beyond small derived properties; they are passed between all parts of the
trainer process (producer thread -> queue -> training loop -> ledger).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from async_rl.proof.logprob_gaps import LogprobGaps

WeightVersion = str
"""Opaque name of one published set of weights, unique across runs (`<run id>-<publish number>`)."""


UNPROVEN: WeightVersion = "unproven"
"""The version of tokens for which no instance reported the weights that generated them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the dataset, tokenized.

    `prompt_id` names the dataset row (stable over runs); `row` is that row as loaded, handed to the reward.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens `start <= i < end` were sampled from `version` (vLLM's `weight_versions` entry)."""

    version: WeightVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One sampled continuation of a prompt.

    `logprobs[i]` is the natural log-probability with which the instance sampled `token_ids[i]`, after temperature.
    A stop token is part of `token_ids`. `finish_reason` is "stop" or "length". `instance` is the URL of the instance
    that finished it. `num_continued` counts how often another request continued it from its prefix, `num_resampled` how
    often it was sampled again from the start, under the same seed, because an instance without streaming was lost.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    weight_spans: tuple[WeightSpan, ...]
    instance: str
    num_continued: int = 0
    num_resampled: int = 0

    @property
    def weight_versions(self) -> frozenset[WeightVersion]:
        """All versions its tokens were sampled from; includes `UNPROVEN` if the spans do not cover every token."""
        ends = [0, *(span.end for span in self.weight_spans)]
        starts = [*(span.start for span in self.weight_spans), len(self.token_ids)]
        versions = {span.version for span in self.weight_spans}
        return frozenset(versions if ends == starts else versions | {UNPROVEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt's G responses with their rewards: the unit that the queue holds and the trainer consumes.

    `index` is the prompt's index in its batch. `started_s` and `finished_s` are `time.monotonic()` seconds of the
    dispatch and of the last score; `attempts` counts how often the group was sent to an instance (1 = no retry).
    """

    iteration: int
    index: int
    prompt: Prompt
    responses: tuple[Response, ...]
    rewards: tuple[float, ...]
    weight_version: WeightVersion
    started_s: float
    finished_s: float
    attempts: int = 1

    @property
    def num_response_tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.responses)


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts of one iteration, by their index; a share of a batch keeps the indices of the whole batch."""

    iteration: int
    prompts: Mapping[int, Prompt]

    def share(self, rank: int, size: int) -> "Batch":
        """The prompts at indices congruent to `rank` modulo `size`: the share of one of `size` leaders."""
        return Batch(self.iteration, {i: p for i, p in self.prompts.items() if i % size == rank})

    def split(self, num_parts: int) -> "list[Batch]":
        """Consecutive indices in `num_parts` mini-batches of nearly equal size, one per optimizer step.

        They are split by index, not by order of completion, which would put short responses first.
        """
        indices = sorted(self.prompts)
        bounds = [len(indices) * part // num_parts for part in range(num_parts + 1)]
        return [Batch(self.iteration, {i: self.prompts[i] for i in indices[a:b]}) for a, b in pairwise(bounds)]

    @classmethod
    def union(cls, parts: "Sequence[Batch]") -> "Batch":
        """Joins the parts of one batch."""
        return cls(parts[0].iteration, {i: prompt for part in parts for i, prompt in part.prompts.items()})


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of one publish: the version, the fingerprint both sides agree on, and the URLs that serve it."""

    version: WeightVersion
    fingerprint: str
    instances: tuple[str, ...]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupProof:
    """One ledger row: a trained group's content and how far the trainer's log-probs were from the rollout's.

    `versions` are all weight versions its tokens were sampled from; `gaps` compares the trainer's log-probs of its
    response tokens with the rollout's, by instance; `samples` digests its response tokens.
    """

    index: int
    prompt_id: str
    num_responses: int
    num_prompt_tokens: int
    num_response_tokens: int
    versions: tuple[WeightVersion, ...]
    rewards: tuple[float, ...]
    attempts: int
    gaps: tuple[tuple[str, LogprobGaps], ...]
    num_continued: int = 0
    num_resampled: int = 0
    samples: str = ""

    @classmethod
    def of(cls, group: Group, gaps: Mapping[str, LogprobGaps]) -> "GroupProof":
        """The row of a trained group with the given gaps, by instance."""
        return cls(
            index=group.index,
            prompt_id=group.prompt.prompt_id,
            num_responses=len(group.responses),
            num_prompt_tokens=len(group.prompt.token_ids),
            num_response_tokens=group.num_response_tokens,
            versions=tuple(sorted(frozenset().union(*(r.weight_versions for r in group.responses)))),
            rewards=group.rewards,
            attempts=group.attempts,
            gaps=tuple(gaps.items()),
            num_continued=sum(response.num_continued for response in group.responses),
            num_resampled=sum(response.num_resampled for response in group.responses),
            samples=digest_of([response.token_ids for response in group.responses]),
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "GroupProof":
        """The row from its JSON form, as written with `asdict`."""
        gaps = tuple((instance, LogprobGaps.from_json(value)) for instance, value in row["gaps"])
        lists = {"versions": tuple(row["versions"]), "rewards": tuple(row["rewards"])}
        return cls(**{**row, **lists, "gaps": gaps})

    @property
    def all_gaps(self) -> LogprobGaps:
        """Over all its response tokens."""
        return LogprobGaps.total(gaps for _, gaps in self.gaps)


def digest_of(parts: Sequence[Any]) -> str:
    """A short digest of the parts and their order."""
    return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures of one optimizer step, over the whole batch: `loss` is normalised, `metrics` are named means.

    `num_untrained` groups had no gradient, and no backward pass was run for them. `skipped`: the gradient was not
    finite and no step was taken; weights and moments are unchanged.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_untrained: int = 0
    skipped: bool = False

    @classmethod
    def mean(cls, steps: "Sequence[StepStats]") -> "StepStats":
        """The figures of several steps as one: means over the steps taken, if any; `num_untrained` is summed."""
        taken = [step for step in steps if not step.skipped]
        counted = taken or steps
        return cls(
            fmean(step.loss for step in counted),
            fmean(step.grad_norm for step in counted),
            fmean(step.learning_rate for step in counted),
            {name: fmean(step.metrics[name] for step in counted) for name in counted[0].metrics},
            sum(step.num_untrained for step in steps),
            not taken,
        )
