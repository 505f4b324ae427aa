"""A loading canary: checks, once per kind of engine, that every class of tensors reaches the engine's computation.

Before the first batch the publisher sends a copy of the weights in which every class (embedding, head, each norm, q,
k, v, ...) is changed, and samples tokens from the instances. The trainer computes these tokens' log-probs under the
same weights, and under those in which one class is unchanged: the result of an engine with a stale copy of that class.
An engine whose log-probs differ from the first by more than rounding passes only if every class, left unchanged, moves
them by far more; how much noise the run allows does not matter. One that is near to another is named with that class.

Of one that is near to none the class is found by further publishes to it alone, in which classes are constant: a
constant tensor is right in whatever order or place it is loaded, so the engine agrees once the wrong ones are constant.

Where adapters are published alone it is their factors that are changed: the base is proven by its digest. The trainer
computes what the tokens' log-probs would be without them, too, with all of one kind of factor as before, and with them
multiplied by another number.
"""

import logging
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceError
from async_rl.method.proof.gap_limits import HEADROOM
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.adapter_faults import Changes, Trials
from async_rl.rollouts.publish.trial_request import NUM_TOKENS, Samples, TrialRequest
from async_rl.shared.protocol.adapter import A, B
from async_rl.shared.protocol.sender import ALL_STRENGTHS, CONSTANT, SCALE, Sender, SenderFacts

log = logging.getLogger(__name__)

Kind = str
"""Distinguishes engines that load weights in different ways: server, version, workers and their options, dtype.

In exact mode each process is of its own kind: what bits it computes also depends on --exact, its processor and torch.
"""

Sample = Callable[[Sequence[Member]], Mapping[Member, Samples]]
"""Publishes the trainer's weights as they are to these instances, and samples from them; without those that fail."""

MAX_PROMPT_TOKENS = 128
"""Attention needs some context for its weights to matter; a long one only costs time."""

VISIBLE = 6.0
"""A class is visible if leaving it out changes log-probs by this many times the noise scale, on average per token."""

MARGIN = 1.5
"""Factor by which a class must be more visible on the prompt's tokens, as it may be less so on sampled ones."""

CLEARLY = 4.0
"""An engine's log-probs are clearly nearer to one set than to another if the distance is this many times smaller."""

DISTINCT = 3.0
"""A class shows that an engine has it right if leaving it out would move log-probs by this many times the distance from
the expected ones. A tensor that is loaded in a wrong order moves them at least as much as one that is left out."""

EVERYTHING = "every tensor"
UNCLEAR = "unclear"

PERCENT = (50, 150, 200)
"""Multiples of adapters' scale that an engine may compute with, beside those with alpha in place of alpha / rank."""


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
        rounding: float | None = None,
        exact: bool = False,
    ) -> None:
        """Args:
        noise: RMS of log-prob differences of correct engines, see `gap_limits.NoiseLimits`. Classes are changed
            by enough to be visible beside it.
        dtype: of the published weights.
        rounding: RMS of the differences that rounding explains, `gap_limits.noise_scale`; `noise` by default.
        exact: whether log-probs must be equal.
        """
        self._is_always = config.canary == "always"
        self._timeout_s = config.timeout_s
        self._request = TrialRequest("canary", config, rollout, prompt_token_ids[:MAX_PROMPT_TOKENS], NUM_TOKENS)
        self._prompt = self._request.prompt
        self._noise = noise
        self._rounding = noise if rounding is None else min(noise, rounding)
        self._dtype = dtype
        self._exact = exact
        self._passed: set[Kind] = set()
        self.kinds: dict[Member, Kind] = {}
        """The kind that each instance reported."""
        self._strengths: dict[str, int] = {}

    async def due(self, member: Member) -> bool:
        """Whether `member` has to pass before it serves. Queries its kind, unless it has been in service since.

        Raises:
            InstanceError: it does not report its kind.
        """
        if member.state != "ready" or member not in self.kinds:
            self.kinds[member] = await self._kind_of(member)
        return self._is_always or self.kinds[member] not in self._passed

    async def ask(self, client: InstanceClient, version: WeightVersion) -> Samples:
        """As `TrialRequest.ask`."""
        return await self._request.ask(client, version)

    @contextmanager
    def changed(self, trainer: Sender) -> Iterator[None]:
        """Changes the trainer's weights while the context is open, every class by enough to be visible.

        After an error they stay changed: the ranks may no longer be synchronised, and each restores its own.
        """
        self._calibrate(trainer)
        yield
        trainer.change({})

    def judge(self, answers: Mapping[Member, Samples], trainer: Sender, sample: Sample) -> dict[Member, InstanceError]:
        """Errors of the instances that do not compute with the weights sent. Notes the kinds of those that do."""
        responses = list(dict.fromkeys(tokens for samples in answers.values() for tokens, _ in samples))
        if not responses:
            return {}
        facts = trainer.facts()
        scores = {
            name: dict(zip(responses, self._score(trainer, changes, responses), strict=True))
            for name, changes in {"": {}, **_signatures(facts)}.items()
        }
        failures: dict[Member, InstanceError] = {}
        units = _units(facts)
        wrong: dict[Kind, tuple[str, ...]] = {}
        for member, samples in answers.items():
            found, kind = _compare(samples, scores), self.kinds[member]
            problem = self._problem(found, has_adapters=facts.adapter is not None)
            if problem == UNCLEAR:
                # Engines of a kind load in the same way, so one of them tells what the others do.
                if kind not in wrong:
                    wrong[kind] = self._search(member, samples, found.own, trainer, sample)
                problem = self._unclear(found, wrong[kind], units, has_adapters=facts.adapter is not None)
            if problem is not None:
                failures[member] = InstanceError(f"instance {member.url} {problem}")
                continue
            log.info("canary: %s (%s) computes with the weights it receives", member.url, kind)
            if hidden := found.hidden:
                text = "canary: the tokens sampled from %s cannot show whether it takes over %s"
                log.warning(text, member.url, ", ".join(hidden))
        passed = {self.kinds[member] for member in answers if member not in failures}
        self._passed |= passed - {self.kinds[member] for member in failures}
        return failures

    async def _kind_of(self, member: Member) -> Kind:
        client = member.client
        kind = f"{client.dialect.name} {client.server}, {await client.engine_options(self._timeout_s)}, {self._dtype}"
        return f"{kind}, process {member.boot_id} at {member.url}" if self._exact else kind

    def _score(self, trainer: Sender, changes: Changes, responses: Sequence[TokenIds]) -> list[list[float]]:
        """Log-probs with every class changed, but for `changes`."""
        strengths = {**self._strengths, **changes}
        trainer.change({name: strength for name, strength in strengths.items() if strength is not None})
        return trainer.score(self._prompt, responses)

    def _calibrate(self, trainer: Sender) -> None:
        """Finds strengths at which each class left out is visible in the log-probs of some tokens; leaves them set."""
        tokens = TokenIds(self._prompt[i % len(self._prompt)] for i in range(self._request.sampling.max_tokens))
        facts = trainer.facts()
        self._strengths = dict.fromkeys(facts.classes, 1)
        for _ in range(ALL_STRENGTHS):
            (expected,) = self._score(trainer, {}, [tokens])
            weak = {
                name
                for name in facts.classes
                if not self._effect(trainer, name, tokens, expected) >= MARGIN * VISIBLE * self._noise
                and self._strengths[name] < ALL_STRENGTHS
            }
            if not weak:
                break
            if weak & set(facts.one_tensor):
                weak |= set(facts.one_tensor)
            for name in weak:
                self._strengths[name] += 1
        trainer.change(self._strengths)

    def _effect(self, trainer: Sender, name: str, tokens: TokenIds, expected: Sequence[float]) -> float:
        """How far log-probs move where one class stays as it was."""
        return _distance(self._score(trainer, {name: None}, [tokens])[0], expected)

    def _problem(self, found: "_Comparison", *, has_adapters: bool) -> str | None:
        """Why an instance's log-probs fail the check, None if they pass, `UNCLEAR` if only a search can tell.

        One adapter of many that is left out may move them by less than a third of what its class does: so with adapters
        they have to be as near as those of a batch (`gap_limits`), too.
        """
        if not math.isfinite(found.own):
            return "answers with log-probs that are no finite numbers"
        is_near = not has_adapters or found.own <= HEADROOM * self._noise
        if found.own <= self._rounding or (is_near and not found.is_stale and not found.hidden):
            if self._exact and found.own > 0:
                return (
                    f"answers with log-probs {found.own:.3g} nats per token from those of the weights it was sent, and "
                    "train.exact allows no difference: start it with --exact, on the trainer's kind of processor and "
                    "release of torch"
                )
            return None
        if has_adapters or not found.is_stale:
            return UNCLEAR
        nearest = found.nearest
        distances = f"its log-probs are {found.own:.3g} nats per token from the weights it was sent"
        return (
            f"received the weights, but computes with a stale copy of {nearest}: {distances}, "
            f"{found.distances[nearest]:.3g} from those with {nearest} as before; its loader does not put that tensor "
            "where it is used"
        )

    def _unclear(
        self, found: "_Comparison", wrong: Sequence[str], units: Sequence[Sequence[str]], *, has_adapters: bool
    ) -> str:
        """The text for an instance that computes with neither the weights sent nor a stale copy of a class.

        Args:
            wrong: what `_search` found.
        """
        own = f"its log-probs are {found.own:.3g} nats per token from the weights it was sent"
        if wrong and has_adapters:
            return f"received the adapters, but computes with {wrong[0]}: {own}"
        loader = "its loader puts these tensors in another order or place than its kernels expect"
        if "embedding" in wrong:
            loader += ", or it is given other tokens than it is sent, which equal embeddings hide"
        if wrong and wrong != units[-1]:
            return (
                f"received the weights, but computes with wrong ones of {' and '.join(wrong)}: {own}, and agree if all "
                f"values of these tensors are equal; {loader}"
            )
        text = f"does not clearly compute with the weights it was sent: {own}"
        if wrong:
            others = "its dtype, temperature or engine options are others than the trainer's"
            text += f", and equal values of no other class than {' and '.join(wrong)} mend that; {loader}, or {others}"
        if found.own > self._noise:
            return f"{text}; if it is meant to be so noisy (quantised), set train.logprob_noise to the noise's RMS"
        weakest = min(found.hidden, key=found.effects.__getitem__)
        effect = found.effects[weakest]
        return (
            f"{text}. train.logprob_noise = {self._noise:g} allows so much noise, but then nothing shows whether it "
            f"takes over {', '.join(found.hidden)}: {weakest} left as it was would move log-probs by {effect:.3g} nats "
            f"per token, so that the noise must be below {effect / DISTINCT:.2g}; use an engine that computes in "
            "model.dtype, or do without this proof (publish.canary = 'off')"
        )

    def _search(self, member: Member, samples: Samples, own: float, trainer: Sender, sample: Sample) -> tuple[str, ...]:
        """What the engine has wrong, found by publishes to it alone: classes, or a fault of `adapter_faults`; none if
        nothing explains its `samples`, or it is lost meanwhile."""
        facts = trainer.facts()
        units = _units(facts)

        def distance(samples: Samples, changes: Changes) -> float:
            expected = self._score(trainer, changes, [tokens for tokens, _ in samples])
            return _distance(_flat(logprobs for _, logprobs in samples), _flat(expected))

        def publish(changes: Changes) -> Samples:
            strengths = {**self._strengths, **changes}
            trainer.change({name: strength for name, strength in strengths.items() if strength is not None})
            samples = sample([member]).get(member)
            if samples is None:
                raise _Lost
            return samples

        def agrees(distance: float) -> bool:
            return distance <= min(self._rounding, own / CLEARLY)

        def agrees_without(units: Sequence[tuple[str, ...]]) -> bool:
            constant = dict.fromkeys((name for unit in units for name in unit), CONSTANT)
            found = distance(publish(constant), constant)
            log.info("canary: %s with constant %s: %.3g nats per token", member.url, ", ".join(constant), found)
            return agrees(found)

        try:
            if facts.adapter is None:
                # The last unit has the head: constant, that hides everything.
                return _located(units[:-1], agrees_without) or units[-1]
            locate = partial(_located, units, agrees_without)
            is_near = partial(operator.gt, own / CLEARLY)
            trials = Trials(facts, self._strengths, samples, distance, publish, agrees, is_near, locate)
            fault = trials.fault()
            return () if fault is None else (fault,)
        except _Lost:
            log.warning("canary: %s was lost in the search for the class that it has wrong", member.url)
            return ()


def _located(units: Sequence[tuple[str, ...]], agrees: Callable[[Sequence[tuple[str, ...]]], bool]) -> tuple[str, ...]:
    """The classes outside which nothing is wrong; none if it does not agree without any of them.

    Makes the first units constant, as few as mend the log-probs: the last of these is wrong. Then the last ones of
    these, as few as mend them: the first of these is wrong too, and nothing outside is.
    """
    last = bisect_left(range(len(units)), True, key=lambda end: agrees(units[: end + 1]))
    if last == len(units):
        return ()
    first = last - bisect_left(range(last), True, key=lambda size: agrees(units[last - size : last + 1]))
    return tuple(name for unit in units[first : last + 1] for name in unit)


NO_ADAPTERS = "no adapters"


def _units(facts: SenderFacts) -> list[tuple[str, ...]]:
    """Classes that a search takes together: one tensor, or both factors of a kind of layer."""
    if facts.adapter is not None:
        return list(zip(facts.classes[::2], facts.classes[1::2], strict=True))
    apart: list[tuple[str, ...]] = [(name,) for name in facts.classes if name not in facts.one_tensor]
    return apart + ([tuple(facts.one_tensor)] if facts.one_tensor else [])


def _signatures(facts: SenderFacts) -> dict[str, Changes]:
    """What an engine may compute with instead, by name -> what is then otherwise: stale copies; of adapters, more."""
    found: dict[str, Changes] = {}
    if facts.adapter is not None:
        found[NO_ADAPTERS] = dict.fromkeys(facts.classes, CONSTANT)
        for percent in dict.fromkeys((*PERCENT, 100 * max(2, facts.adapter.rank))):
            found[f"{SCALE} x {percent / 100:g}"] = {SCALE: percent}
    found |= {name: {name: None} for name in facts.classes}
    if facts.adapter is not None:
        for factor in (A, B):
            found[f"every {factor}"] = {name: None for name in facts.classes if name.endswith(factor)}
    if facts.one_tensor:
        found[" and ".join(facts.one_tensor)] = dict.fromkeys(facts.one_tensor)
    return found | {EVERYTHING: dict.fromkeys(facts.classes)}


class _Lost(Exception):
    """An instance failed while it was searched for the class that it has wrong."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Distances of an engine's log-probs, in nats per token. A signature is a class, or several, left as they were."""

    own: float
    """From those of the weights sent."""

    effects: Mapping[str, float]
    """By signature: how far its log-probs are from those of the weights sent, by the trainer alone."""

    distances: Mapping[str, float]
    """By signature: from its log-probs."""

    @property
    def nearest(self) -> str:
        return min(self.distances, key=self.distances.__getitem__)

    @property
    def is_stale(self) -> bool:
        return CLEARLY * self.distances[self.nearest] < self.own

    @property
    def hidden(self) -> list[str]:
        """Signatures too weak to show that this engine does not have them."""
        return [name for name, effect in self.effects.items() if not effect > DISTINCT * self.own]


def _compare(samples: Samples, scores: Mapping[str, Mapping[TokenIds, list[float]]]) -> _Comparison:
    answered = _flat(logprobs for _, logprobs in samples)
    scored = {name: _flat(scores[name][tokens] for tokens, _ in samples) for name in scores}
    expected = scored.pop("")
    return _Comparison(
        _distance(answered, expected),
        {name: _distance(other, expected) for name, other in scored.items()},
        {name: _distance(answered, other) for name, other in scored.items()},
    )


def _flat(logprobs: Iterable[Sequence[float]]) -> list[float]:
    return [lp for each in logprobs for lp in each]


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean |difference| in nats per token: an outlier token counts linearly, not by its square."""
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
