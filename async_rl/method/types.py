"""Types that all packages share: prompts, responses, groups, batches and the result of a publish.

All are frozen dataclasses without behaviour beyond small derived properties; they are passed between all parts of the
run (producer -> queue -> training loop -> ledger).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from statistics import fmean
from typing import Any, Literal

from async_rl.method.proof.logprob_gaps import MIXED
from async_rl.method.token_arrays import ExpertIds, Logprobs, TokenIds

WeightVersion = str
"""Opaque name of one published set of weights, unique across runs (`<run id>-<publish number>`)."""


UNPROVEN: WeightVersion = "unproven"
"""The version of tokens for which no instance reported the weights that generated them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the dataset, tokenized.

    `prompt_id` names the dataset row (stable over runs), in a mixture after its part, as "PART/ROW"; `row` is that row
    as loaded, handed to the reward. `stop` and `stop_token_ids` end responses to it besides those of the run;
    `max_response_tokens` is None, or a limit of its own where less than the run's. `reward` has the labels of the parts
    of the reward that score it, where its part of a mixture names them.
    """

    prompt_id: str
    token_ids: TokenIds
    row: Mapping[str, Any] = field(repr=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_response_tokens: int | None = None
    reward: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.token_ids) is not TokenIds:
            object.__setattr__(self, "token_ids", TokenIds(self.token_ids))


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Whether a run's reward can read a row's answer, asked of each row before the run; rows that fail are left out.

    `fault_of` gets a row and the rewards that its part of a mixture names; it says why the answer cannot be read, or
    None. `identity` is the same for checks that always say the same.
    """

    identity: str
    fault_of: Callable[[Mapping[str, Any], tuple[str, ...]], str | None]


NO_CHECK = AnswerCheck("", lambda row, of_mixture: None)


def part_of(prompt_id: str) -> str:
    """The part of a mixture that a prompt is of; empty without one."""
    return prompt_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Of the sampled tokens, those at `start <= i < end` are of `version` (vLLM's `weight_versions` entry)."""

    version: WeightVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The tokens after a prompt that one sequence of the trainer holds; a rollout of a single turn is one response.

    `token_ids[i]` was sampled, unless one of the half-open ranges `observed` contains i. Observed tokens are context:
    what tools, users and environments say between turns, and what another response of the same rollout has sampled
    already. The ranges ascend and do not touch each other; the last token was sampled.

    `logprobs` are the natural log-probabilities, after temperature, with which the instance sampled the sampled tokens,
    in their order. A stop token is part of `token_ids`. `finish_reason` is "stop" or "length". `instance` is the URL of
    the instance that finished it. `num_continued` counts how often another request continued it from its prefix,
    `num_resampled` how often it was sampled again from the start, under the same seed, because an instance without
    streaming was lost.

    `prompt_ids` is what `token_ids` follows if that is not the group's prompt. `turn_instances` has (instance, sampled
    tokens) for each run of turns of one instance, in a response of several turns.

    `routes` are those of its tokens but the last, as the instance that finished it computed them, where
    `train.router_replay` asks for them; a prompt's are `prompt_routes` of the group's first response that follows it.

    `token_weights` multiply the loss of its sampled tokens, `token_rewards` are added to their advantages, where a node
    of the pipeline writes them.

    Tokens and log-probs given as other sequences become arrays.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    text: str
    finish_reason: str
    weight_spans: tuple[WeightSpan, ...]
    instance: str
    num_continued: int = 0
    num_resampled: int = 0
    observed: tuple[tuple[int, int], ...] = ()
    prompt_ids: TokenIds | None = None
    turn_instances: tuple[tuple[str, int], ...] = ()
    routes: ExpertIds | None = None
    prompt_routes: ExpertIds | None = None
    token_weights: Logprobs | None = None
    token_rewards: Logprobs | None = None

    def __post_init__(self) -> None:
        if type(self.token_ids) is not TokenIds:
            object.__setattr__(self, "token_ids", TokenIds(self.token_ids))
        if type(self.logprobs) is not Logprobs:
            object.__setattr__(self, "logprobs", Logprobs(self.logprobs))
        if self.prompt_ids is not None and type(self.prompt_ids) is not TokenIds:
            object.__setattr__(self, "prompt_ids", TokenIds(self.prompt_ids))

    @property
    def sampled_by(self) -> tuple[tuple[str, int], ...]:
        """(instance, number of sampled tokens), in their order; `MIXED` for what several requests sampled."""
        return self.turn_instances or ((MIXED if self.num_continued else self.instance, self.num_sampled),)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - sum(end - start for start, end in self.observed)

    @property
    def sampled(self) -> Iterator[int]:
        """The indices of its sampled tokens, ascending."""
        return chain.from_iterable(self.sampled_ranges)

    @property
    def sampled_ranges(self) -> Iterator[range]:
        """The indices of each run of sampled tokens, ascending; the first one is empty if `observed` begins at 0."""
        starts = (0, *(end for _, end in self.observed))
        ends = (*(start for start, _ in self.observed), len(self.token_ids))
        return map(range, starts, ends)

    @property
    def weight_versions(self) -> frozenset[WeightVersion]:
        """All versions its tokens were sampled from; includes `UNPROVEN` if the spans do not cover every token."""
        ends = [0, *(span.end for span in self.weight_spans)]
        starts = [*(span.start for span in self.weight_spans), self.num_sampled]
        versions = {span.version for span in self.weight_spans}
        return frozenset(versions if ends == starts else versions | {UNPROVEN})


RewardParts = tuple[tuple[str, tuple[float, ...]], ...]
"""Of a composed reward: each part's label, and its reward of each rollout, before its weight; else empty.

Or of any reward: the name of each metric that it reports, and its value for each rollout."""

UNSHAPED = "unshaped"
"""The metric with the reward itself, where a node of the pipeline writes another one."""

CorrectAt = float | Mapping[str, float] | None
"""The least reward of a correct response: of the whole reward, or by label of parts, of which the first one that scored
the prompt counts; None if no response is correct or incorrect."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reward gives the responses of one prompt, in their order; metrics are shown, and nothing is trained on
    them."""

    rewards: tuple[float, ...]
    parts: RewardParts = ()
    metrics: RewardParts = ()

    @property
    def shown(self) -> RewardParts:
        """All that figures have of it beside the rewards."""
        return (*self.parts, *self.metrics)


def have_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ; so does what is not a number, which is then refused where it is trained."""
    return any(reward != rewards[0] for reward in rewards)


def num_correct(correct_at: CorrectAt, rewards: Sequence[float], parts: RewardParts) -> int | None:
    """How many of a prompt's responses are correct, by the reward before a node of the pipeline shaped it; None if that
    is not defined for them."""
    rewards = dict(parts).get(UNSHAPED, rewards)
    if isinstance(correct_at, Mapping):
        judged = [(correct_at[label], values) for label, values in parts if label in correct_at]
        correct_at, rewards = judged[0] if judged else (None, ())
    return None if correct_at is None else sum(reward >= correct_at for reward in rewards)


def reward_part_means(groups: Iterable[RewardParts]) -> dict[str, float]:
    """`reward/LABEL` -> the mean of this part's rewards, or this metric's values, over all responses that have it."""
    values: dict[str, list[float]] = {}
    for parts in groups:
        for label, rewards in parts:
            values.setdefault(f"reward/{label}", []).extend(rewards)
    return {name: fmean(each) for name, each in values.items()}


Status = Literal["completed", "truncated"]
"""How a rollout ended: by itself, or at a limit (turns, tokens, time), which is an outcome like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    """What the trainer needs to know of one rollout besides its responses and its reward.

    Its responses are the next `num_responses` of its group: one, and one more for each branch. `num_turns` counts
    generations. `turn_rewards` are recorded only; the rollout's reward is what is trained. `weight` is what a node of
    the pipeline says that it counts.
    """

    num_responses: int = 1
    num_turns: int = 1
    status: Status = "completed"
    turn_rewards: tuple[float, ...] = ()
    weight: float = 1.0

    @classmethod
    def single_turn(cls, response: Response) -> "RolloutFacts":
        """Those of a rollout that is one response; it was cut at the limit of tokens if it ended by "length"."""
        return _CUT if response.finish_reason == "length" else _COMPLETED


_COMPLETED, _CUT = RolloutFacts(), RolloutFacts(status="truncated")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGroup:
    """What a piece of a group knows of all of the group's rollouts, on which its own advantages depend.

    `first_rollout` is the number of the piece's first rollout among them; lengths are sampled tokens.
    """

    first_rollout: int
    rewards: tuple[float, ...]
    rollout_lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    reward_parts: RewardParts
    weights: tuple[float, ...] = ()


GroupKey = tuple[int, int]
"""(a group's index, the number of its first rollout): whole groups have 0, the pieces of one group differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt's G rollouts with their rewards: the unit that the queue holds and the trainer consumes.

    Or a piece of one, some of its rollouts (`pieces.py`): then `whole` is set.

    `responses` are those of all rollouts, in the order of these; `rewards` and `rollouts` have one entry per rollout.
    By default each response is a rollout of a single turn. Advantages, baselines and lengths are those of rollouts,
    however many branches these have. `reward_parts` are those of a composed reward, `reward_metrics` what a reward
    reports beside, if it scored every rollout.

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
    rollouts: tuple[RolloutFacts, ...] = ()
    reward_parts: RewardParts = ()
    reward_metrics: RewardParts = ()
    whole: WholeGroup | None = None

    def __post_init__(self) -> None:
        if not self.rollouts:
            object.__setattr__(self, "rollouts", tuple(map(RolloutFacts.single_turn, self.responses)))
        for number, facts in enumerate(self.rollouts):
            assert facts.num_responses > 0, f"rollout {number} of group {self.index} has no response"
        num_responses = sum(facts.num_responses for facts in self.rollouts)
        assert num_responses == len(self.responses), (
            f"{num_responses} of {len(self.responses)} responses have a rollout"
        )
        assert len(self.rewards) == len(self.rollouts), f"{len(self.rewards)} rewards, {len(self.rollouts)} rollouts"
        for label, values in (*self.reward_parts, *self.reward_metrics):
            assert len(values) == len(self.rollouts), f"{len(values)} of {label!r}, {len(self.rollouts)} rollouts"

    @property
    def first_rollout(self) -> int:
        """Of a piece, the number of its first rollout in the group; else 0."""
        return 0 if self.whole is None else self.whole.first_rollout

    @property
    def key(self) -> GroupKey:
        return self.index, self.first_rollout

    @property
    def num_response_tokens(self) -> int:
        """Sampled tokens of all responses."""
        return sum(response.num_sampled for response in self.responses)

    @property
    def truncated(self) -> tuple[bool, ...]:
        """For each rollout, whether a limit ended it."""
        return tuple(facts.status == "truncated" for facts in self.rollouts)

    @property
    def weights(self) -> tuple[float, ...]:
        """For each rollout, what a node of the pipeline says that it counts; empty if all count as one."""
        weights = tuple(facts.weight for facts in self.rollouts)
        return () if set(weights) == {1.0} else weights

    @property
    def rollout_of(self) -> tuple[int, ...]:
        """For each response, the number of its rollout."""
        return tuple(i for i, facts in enumerate(self.rollouts) for _ in range(facts.num_responses))

    @property
    def rollout_lengths(self) -> tuple[int, ...]:
        """For each rollout, its sampled tokens, over all of its responses."""
        lengths = [0] * len(self.rollouts)
        for rollout, response in zip(self.rollout_of, self.responses, strict=True):
            lengths[rollout] += response.num_sampled
        return tuple(lengths)

    @property
    def responses_by_prompt(self) -> dict[TokenIds, list[int]]:
        """Each prompt that responses follow, once: its token ids -> the indices of these responses, ascending."""
        by_own: dict[TokenIds | None, list[int]] = {}
        for i, response in enumerate(self.responses):
            # The group's own is None, which need not be hashed for every response.
            own = None if response.prompt_ids == self.prompt.token_ids else response.prompt_ids
            by_own.setdefault(own, []).append(i)
        return {self.prompt.token_ids if own is None else own: indices for own, indices in by_own.items()}


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts of one iteration, by their index; a share of a batch keeps the indices of the whole batch.

    Prompts from `first_reserve` on are a reserve: as many groups are trained as there are prompts before it, and
    `async_rl.method.selection` says which.
    """

    iteration: int
    prompts: Mapping[int, Prompt]
    first_reserve: int | None = None

    @property
    def num_trained(self) -> int:
        """How many of its groups are trained."""
        if self.first_reserve is None:
            return len(self.prompts)
        return sum(index < self.first_reserve for index in self.prompts)

    @property
    def has_reserve(self) -> bool:
        return self.num_trained < len(self.prompts)

    def share(self, rank: int, size: int) -> "Batch":
        """The prompts at indices congruent to `rank` modulo `size`: the share of one of `size` replicas."""
        return replace(self, prompts={i: p for i, p in self.prompts.items() if i % size == rank})

    def split(self, num_parts: int) -> "list[Batch]":
        """Consecutive indices in `num_parts` mini-batches of nearly equal size, one per optimizer step.

        They are split by index, not by order of completion, which would put short responses first.
        """
        assert num_parts == 1 or not self.has_reserve, "which groups are trained is known at the end of the batch"
        indices = sorted(self.prompts)
        bounds = [len(indices) * part // num_parts for part in range(num_parts + 1)]
        return [replace(self, prompts={i: self.prompts[i] for i in indices[a:b]}) for a, b in pairwise(bounds)]

    @classmethod
    def union(cls, parts: "Sequence[Batch]") -> "Batch":
        """Joins the parts of one batch."""
        return replace(parts[0], prompts={i: prompt for part in parts for i, prompt in part.prompts.items()})


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of one publish: the version, the fingerprint both sides agree on, and the URLs that serve it.

    `num_workers` are those of all these instances, which have a device each; None if one of them did not say.
    `canary_s` of its `seconds` went into the check with changed weights.
    """

    version: WeightVersion
    fingerprint: str
    instances: tuple[str, ...]
    num_bytes: int
    seconds: float
    num_workers: int | None = None
    canary_s: float = 0.0


DIGEST_CHARACTERS = 16
"""Hexadecimal digits of the digests in records."""


def digest_of(parts: Sequence[Any]) -> str:
    """A short digest of the parts and their order."""
    return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()[:DIGEST_CHARACTERS]
