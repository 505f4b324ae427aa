"""A loading canary: checks, once per kind of engine, that every class of tensors reaches the engine's computation.

Before the first batch the publisher sends a copy of the weights in which every class (embedding, head, each norm, q,
k, v, ...) is changed, and samples tokens from the instances. The trainer computes these tokens' log-probs under the
same weights, and under those in which one class is unchanged: the result of an engine with a stale copy of that class.
An engine passes if it is nearer to the first than to any of the others, and otherwise is named with the nearest class.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceError, InstanceUnreachable
from async_rl.instance.client import InstanceClient
from async_rl.instance.partial_rollout import PartialRollout
from async_rl.pool.member import Member
from async_rl.protocol.inference import SamplingParams
from async_rl.types import WeightVersion

log = logging.getLogger(__name__)

Kind = str
"""Distinguishes engines that load weights in different ways: server, version, workers and their options, dtype.

In exact mode each process is of its own kind: what bits it computes also depends on --exact, its processor and torch.
"""

Samples = Sequence[tuple[tuple[int, ...], tuple[float, ...]]]
"""(tokens, log-probs) of each response."""

ALL_STRENGTHS = 3
"""The largest strength of a class's change; 1 is the smallest."""

NUM_TOKENS = 64
"""Sampled from each instance: enough that a few tokens with a different MoE routing are not decisive."""

MAX_PROMPT_TOKENS = 128
"""Attention needs some context for its weights to matter; a long one only costs time."""

VISIBLE = 6.0
"""A class is visible if leaving it out changes log-probs by this many times the noise scale, on average per token."""

MARGIN = 1.5
"""Factor by which a class must be more visible on the prompt's tokens, as it may be less so on sampled ones."""

CLEARLY = 2.0
"""An engine's log-probs are clearly nearer to one set than to another if the distance is this many times smaller."""

EVERYTHING = "every tensor"
SEED = 0


class CanaryTrainer(Protocol):
    """The trainer as the canary uses it: between two batches, from the main thread of the main rank."""

    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def one_tensor(self) -> Sequence[str]: ...

    def change(self, strengths: Mapping[str, int]) -> None:
        """Changes classes of the weights, each by its strength; the classes left out have their true values."""
        ...

    def score(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each response's tokens under the weights as they are, after temperature."""
        ...


class Canary:
    """Which kinds of engines have passed in this process, and how they are judged.

    A resumed run checks again at its first publish: servers may have been replaced since.
    """

    def __init__(
        self,
        config: PublishSection,
        rollout: RolloutSection,
        prompt_token_ids: Sequence[int],
        noise: float,
        dtype: str,
        *,
        exact: bool = False,
    ) -> None:
        """Args:
        noise: RMS of log-prob differences of correct engines, see `gap_limits.NoiseLimits`.
        dtype: of the published weights.
        exact: whether log-probs must be equal.
        """
        self._is_always = config.canary == "always"
        self._timeout_s = config.timeout_s
        self._prompt = list(prompt_token_ids)[:MAX_PROMPT_TOKENS]
        self._noise = noise
        self._dtype = dtype
        self._exact = exact
        self._passed: set[Kind] = set()
        self.kinds: dict[Member, Kind] = {}
        """The kind that each instance reported."""
        self._strengths: dict[str, int] = {}
        length = min(NUM_TOKENS, rollout.max_response_tokens)
        self._num_responses = math.ceil(NUM_TOKENS / length)
        self._sampling = SamplingParams(
            max_tokens=length, temperature=rollout.temperature, seed=SEED, ignore_eos=True, logprobs=0
        )

    async def due(self, member: Member) -> bool:
        """Whether `member` has to pass before it serves. Queries its kind, unless it has been in service since.

        Raises:
            InstanceError: it does not report its kind.
        """
        if member.state != "ready" or member not in self.kinds:
            self.kinds[member] = await self._kind_of(member)
        return self._is_always or self.kinds[member] not in self._passed

    async def ask(self, client: InstanceClient, version: WeightVersion) -> Samples:
        """Some responses of the instance, within `publish.timeout_s`.

        Raises:
            InstanceError: it did not return complete responses of `version`.
        """
        partials = [PartialRollout(SEED + i) for i in range(self._num_responses)]
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.generate(self._prompt, self._sampling, f"canary-{version}", version, partials)
        except TimeoutError as error:
            raise InstanceUnreachable(
                f"instance {client.url} did not answer the canary {version!r} within {self._timeout_s:g} s "
                "(publish.timeout_s)"
            ) from error
        return [(tuple(partial.token_ids), tuple(partial.logprobs)) for partial in partials]

    @contextmanager
    def changed(self, trainer: CanaryTrainer) -> Iterator[None]:
        """Changes the trainer's weights while the context is open, every class by enough to be visible.

        After an error they stay changed: the ranks may no longer be synchronised, and each restores its own.
        """
        self._calibrate(trainer)
        yield
        trainer.change({})

    def judge(self, answers: Mapping[Member, Samples], trainer: CanaryTrainer) -> dict[Member, InstanceError]:
        """Errors of the instances that do not compute with the weights sent. Notes the kinds of those that do."""
        responses = list(dict.fromkeys(tokens for samples in answers.values() for tokens, _ in samples))
        if not responses:
            return {}
        scores = {
            name: dict(zip(responses, self._score(trainer, left_out, responses), strict=True))
            for name, left_out in (("", ()), *self._signatures(trainer).items())
        }
        self._warn_of_hidden(scores)
        failures: dict[Member, InstanceError] = {}
        for member, samples in answers.items():
            problem = self._problem(samples, scores)
            if problem is not None:
                failures[member] = InstanceError(f"instance {member.url} {problem}")
            else:
                log.info("canary: %s (%s) computes with the weights it receives", member.url, self.kinds[member])
        passed = {self.kinds[member] for member in answers if member not in failures}
        self._passed |= passed - {self.kinds[member] for member in failures}
        return failures

    async def _kind_of(self, member: Member) -> Kind:
        client = member.client
        kind = f"{client.dialect.name} {client.server}, {await client.engine_options(self._timeout_s)}, {self._dtype}"
        return f"{kind}, process {member.boot_id} at {member.url}" if self._exact else kind

    def _signatures(self, trainer: CanaryTrainer) -> dict[str, tuple[str, ...]]:
        """Possible stale copies, by name -> the classes that are then unchanged."""
        found: dict[str, tuple[str, ...]] = {name: (name,) for name in trainer.classes}
        if trainer.one_tensor:
            found[" and ".join(trainer.one_tensor)] = tuple(trainer.one_tensor)
        return found | {EVERYTHING: tuple(trainer.classes)}

    def _score(
        self, trainer: CanaryTrainer, left_out: Sequence[str], responses: Sequence[tuple[int, ...]]
    ) -> list[list[float]]:
        """Log-probs with every class changed but those in `left_out`."""
        trainer.change({name: strength for name, strength in self._strengths.items() if name not in left_out})
        return trainer.score(self._prompt, responses)

    def _calibrate(self, trainer: CanaryTrainer) -> None:
        """Finds strengths at which each class left out is visible in the log-probs of some tokens; leaves them set."""
        tokens = tuple(self._prompt[i % len(self._prompt)] for i in range(self._sampling.max_tokens))
        self._strengths = dict.fromkeys(trainer.classes, 1)
        for _ in range(ALL_STRENGTHS):
            (expected,) = self._score(trainer, (), [tokens])
            weak = {
                name
                for name in trainer.classes
                if not _distance(self._score(trainer, (name,), [tokens])[0], expected) >= MARGIN * VISIBLE * self._noise
                and self._strengths[name] < ALL_STRENGTHS
            }
            if not weak:
                break
            if weak & set(trainer.one_tensor):
                weak |= set(trainer.one_tensor)
            for name in weak:
                self._strengths[name] += 1
        trainer.change(self._strengths)

    def _problem(self, samples: Samples, scores: Mapping[str, Mapping[tuple[int, ...], list[float]]]) -> str | None:
        """Why an instance's log-probs fail the check, or None."""
        answered = [logprob for _, logprobs in samples for logprob in logprobs]
        expected, *others = ([lp for tokens, _ in samples for lp in scores[name][tokens]] for name in scores)
        own = _distance(answered, expected)
        if not math.isfinite(own):
            return "answers with log-probs that are no finite numbers"
        if self._exact and own > 0:
            return (
                f"answers with log-probs {own:.3g} nats per token from those of the weights it was sent, and "
                "train.exact allows no difference: start it with --exact, on the trainer's kind of processor and "
                "release of torch"
            )
        names = [name for name in scores if name]
        distances = {name: _distance(answered, other) for name, other in zip(names, others, strict=True)}
        visible = [name for name, other in zip(names, others, strict=True) if self._is_visible(other, expected)]
        nearest = min(names, key=distances.__getitem__)
        distance = distances[nearest]
        is_stale = CLEARLY * distance < own
        if own <= self._noise or (not is_stale and all(CLEARLY * own < distances[name] for name in visible)):
            return None
        figures = f"{own:.3g} nats per token from the weights it was sent, {distance:.3g} from those with"
        if is_stale:
            return (
                f"received the weights, but computes with a stale copy of {nearest}: its log-probs are {figures} "
                f"{nearest} as before; its loader does not put that tensor where it is used"
            )
        return (
            f"does not clearly compute with the weights it was sent: its log-probs are {figures} {nearest} as before; "
            "check its dtype and engine options, or set train.logprob_noise if it is meant to be so noisy"
        )

    def _warn_of_hidden(self, scores: Mapping[str, Mapping[tuple[int, ...], list[float]]]) -> None:
        """Logs the classes that the sampled tokens, all together, cannot check."""
        flat = {name: [lp for logprobs in scored.values() for lp in logprobs] for name, scored in scores.items()}
        hidden = [name for name, other in flat.items() if name and not self._is_visible(other, flat[""])]
        if hidden:
            log.warning("canary: the tokens sampled cannot show whether engines take over %s", ", ".join(hidden))

    def _is_visible(self, other: Sequence[float], expected: Sequence[float]) -> bool:
        return _distance(other, expected) >= VISIBLE * self._noise


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean |difference| in nats per token: an outlier token counts linearly, not by its square."""
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
