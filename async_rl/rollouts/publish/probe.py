"""Compares engines with the trainer after a publish, by the log-probs of a few tokens that each of them samples.

A fingerprint proves what an instance received. If a loader is between that and the memory it computes with, only its
log-probs show how the tensors were loaded. One token proves nothing: in bfloat16 a sound engine differs from the
trainer by more than half a nat at one token of a thousand, where a choice of experts is near a tie at five. So it is
counted how many do. `docs/proof.md` derives how often a sound engine fails.
"""

import math
from collections.abc import Mapping, Sequence

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceError
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.trial_request import Samples, TrialRequest
from async_rl.shared.protocol.sender import Score

MAX_LENGTH = 16
"""Tokens of a response. Several are sampled at once: they take as long as one, in an engine that batches."""

WIDE = 8.0
"""A gap is wide if it is this many times the noise scale: half a nat in bfloat16, 0.001 in float32."""

MAX_WIDE = 0.25
"""Largest share of wide gaps: wrong weights make most of them wide."""


class Probe:
    """Samples from instances and judges the log-probs.

    Args:
        noise: RMS of log-prob gaps of correct engines, see `gap_limits.NoiseLimits`, in nats.
    """

    def __init__(
        self, config: PublishSection, rollout: RolloutSection, prompt_token_ids: Sequence[int], noise: float
    ) -> None:
        self._request = TrialRequest("probe", config, rollout, prompt_token_ids, MAX_LENGTH)
        self._wide = WIDE * noise

    async def ask(self, client: InstanceClient, version: WeightVersion) -> Samples:
        """As `TrialRequest.ask`."""
        return await self._request.ask(client, version)

    def judge(self, answers: Mapping[Member, Samples], score: Score) -> dict[Member, InstanceError]:
        """Errors of the instances whose log-probs differ too much from the trainer's."""
        distinct = list(dict.fromkeys(tokens for samples in answers.values() for tokens, _ in samples))
        scored = dict(zip(distinct, score(self._request.prompt, distinct), strict=True)) if distinct else {}
        failures = {}
        for member, samples in answers.items():
            pairs = [pair for tokens, own in samples for pair in zip(own, scored[tokens], strict=True)]
            if (problem := self._problem(pairs)) is not None:
                failures[member] = InstanceError(f"instance {member.url} {problem}")
        return failures

    def _problem(self, pairs: Sequence[tuple[float, float]]) -> str | None:
        """Why an instance fails by its log-probs and the trainer's of the same tokens; None if it passes."""
        infinite = [pair for pair in pairs if not all(map(math.isfinite, pair))]
        if infinite:
            own, trainers = infinite[0]
            return f"gives a token of the probe log-prob {own:g}, the trainer {trainers:g}: expected finite numbers"
        wide = [(own, trainers) for own, trainers in pairs if abs(own - trainers) > self._wide]
        if len(wide) <= MAX_WIDE * len(pairs):
            return None
        own, trainers = max(wide, key=lambda pair: abs(pair[0] - pair[1]))
        return (
            f"gives {len(wide)} of {len(pairs)} tokens of the probe log-probs that are more than {self._wide:.2g} nats "
            f"from the trainer's, one of them {own:.4f} for {trainers:.4f}; a quarter may be: it received the weights, "
            "but computes with others, or in another way; check its dtype and engine options (if it is meant to be so "
            "noisy, set train.logprob_noise)"
        )
