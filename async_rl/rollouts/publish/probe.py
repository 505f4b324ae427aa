"""Compares engines with the trainer after a publish, by the log-probs of a few tokens that each of them samples.

A fingerprint proves what an instance received. If a loader is between that and the memory it computes with, only its
log-probs show how the tensors were loaded. The request is like a rollout's, with the run's temperature: a greedy one
has no temperature, so its log-probs could not be compared with those of rollouts and of the trainer.
Instances sample different tokens; each instance's own tokens are compared.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceError, InstanceUnreachable
from async_rl.method.types import Response, WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import Member
from async_rl.shared.protocol.inference import SamplingParams
from async_rl.shared.protocol.sender import Score

SEED = 0


@dataclass(frozen=True, slots=True)
class Deviation:
    """The token of a response at which an instance and the trainer differ most, by `gap` nats."""

    index: int
    rollout: float
    trainer: float

    @property
    def gap(self) -> float:
        return abs(self.rollout - self.trainer)


MAX_GAP = 0.5
"""Largest difference of two log-probs of one token, in nats: those of two engines in bfloat16 differ by a tenth of it,
those of another version by several nats."""


NUM_TOKENS = 8
"""Sampled by each instance: weights of another version show in the first few."""


class Probe:
    """Samples from instances and judges the log-probs; `prompt_token_ids` is any prompt of the run."""

    def __init__(self, config: PublishSection, rollout: RolloutSection, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = list(prompt_token_ids)
        self._timeout_s = config.timeout_s
        self._sampling = SamplingParams(
            # More tokens than a rollout's may exceed the instances' model length.
            max_tokens=min(NUM_TOKENS, rollout.max_response_tokens),
            temperature=rollout.temperature,
            seed=SEED,
            ignore_eos=True,
            logprobs=0,
        )

    async def ask(self, client: InstanceClient, version: WeightVersion) -> Response:
        """One response of the instance, within `publish.timeout_s`.

        Raises:
            InstanceError: it did not return a complete response of `version`.
        """
        partial = PartialRollout(SEED)
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.generate(self._prompt, self._sampling, f"probe-{version}", version, [partial])
        except TimeoutError as error:
            raise InstanceUnreachable(
                f"instance {client.url} did not answer the probe of {version!r} within {self._timeout_s:g} s "
                "(publish.timeout_s)"
            ) from error
        return partial.response()

    def judge(self, answers: Mapping[Member, Response], score: Score) -> dict[Member, InstanceError]:
        """Errors of the instances whose log-probs differ too much from the trainer's."""
        distinct = list(dict.fromkeys(answer.token_ids for answer in answers.values()))
        scored = dict(zip(distinct, score(self._prompt, distinct), strict=True)) if distinct else {}
        worst = {
            member: largest_deviation(answer.logprobs, scored[answer.token_ids]) for member, answer in answers.items()
        }
        # Not `>`: a NaN gap is also too large.
        return {member: self._failure(member, d) for member, d in worst.items() if not d.gap <= MAX_GAP}

    def _failure(self, member: Member, worst: Deviation) -> InstanceError:
        return InstanceError(
            f"instance {member.url} gives token {worst.index} of the probe log-prob {worst.rollout:.4f}, the trainer "
            f"{worst.trainer:.4f}, more than {MAX_GAP:g} apart: it received the weights, but "
            "computes with others, or in another way; check its dtype and engine options"
        )


def largest_deviation(rollout: Sequence[float], trainer: Sequence[float]) -> Deviation:
    """The token with the largest gap; a NaN gap counts as the largest."""
    deviations = [Deviation(i, *pair) for i, pair in enumerate(zip(rollout, trainer, strict=True))]
    return max(deviations, key=lambda d: d.gap if d.gap == d.gap else float("inf"))
