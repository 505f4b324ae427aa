"""A request whose samples are compared with the trainer's log-probs, for `canary.py` and `probe.py`.

It is like a rollout's, with the run's temperature: a greedy one has no temperature, so its log-probs could not be
compared with those of rollouts and of the trainer. Instances sample different tokens; each one's own are compared.
"""

import asyncio
import math
from collections.abc import Sequence

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceUnreachable
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.shared.protocol.inference import SamplingParams

Samples = Sequence[tuple[TokenIds, Logprobs]]
"""(tokens, log-probs) of each response."""

NUM_TOKENS = 64
"""Sampled from each instance: enough that a few tokens with a different MoE routing are not decisive."""

SEED = 0


class TrialRequest:
    """Asks for NUM_TOKENS tokens, in responses of at most `max_length`.

    Args:
        name: begins the id of each request, and is how errors call it.
        prompt: any prompt of the run.
    """

    def __init__(
        self, name: str, config: PublishSection, rollout: RolloutSection, prompt: Sequence[int], max_length: int
    ) -> None:
        self.prompt = list(prompt)
        self._name = name
        self._timeout_s = config.timeout_s
        # More tokens than a rollout's may exceed the instances' model length.
        length = min(max_length, rollout.max_response_tokens)
        self.num_responses = math.ceil(NUM_TOKENS / length)
        self.sampling = SamplingParams(
            max_tokens=length, temperature=rollout.temperature, seed=SEED, ignore_eos=True, logprobs=0
        )

    async def ask(self, client: InstanceClient, version: WeightVersion) -> Samples:
        """The instance's responses, within `publish.timeout_s`.

        Raises:
            InstanceError: it did not return complete responses of `version`.
        """
        partials = [PartialRollout(SEED + i) for i in range(self.num_responses)]
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.generate(self.prompt, self.sampling, f"{self._name}-{version}", version, partials)
        except TimeoutError as error:
            raise InstanceUnreachable(
                f"instance {client.url} did not answer the {self._name} of {version!r} within {self._timeout_s:g} s "
                "(publish.timeout_s)"
            ) from error
        return [(TokenIds(partial.token_ids), Logprobs(partial.logprobs)) for partial in partials]
