"""One audit: asks the engine, scores its answers by the checkpoint, and names the fault; `__main__.py` calls it."""

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from async_rl.errors import ConfigError
from async_rl.method.proof.gap_limits import MIN_TOKENS, NoiseLimits, noise_scale
from async_rl.records.findings import Finding, fails, holds, not_tested
from async_rl.rollouts.publish.canary import CLEARLY
from trainer.audit.engine import Engine, Sample, tokens_in
from trainer.audit.exact_model import (
    ExactModel,
    load_exact,
    meant_dtype,
    read_adapter,
    reported,
    token_logprobs,
)
from trainer.audit.given import Before, Options, Words, find_files, put_adapters, read_words
from trainer.audit.hypotheses import (
    Hypothesis,
    Values,
    by_weights,
    hypotheses,
    of_shares,
    units_of_adapters,
    units_of_before,
)
from trainer.audit.judge import (
    OTHER_WEIGHTS,
    Evidence,
    Explainer,
    Explanation,
    few,
    wide_responses,
)
from trainer.audit.probes import MESSAGES, TEMPERATURES, TEXTS, Probes, make_probes, needed_length
from trainer.audit.text_checks import (
    NUM_SORTED,
    check_chat,
    check_draws,
    check_ends,
    check_text,
    check_vocabulary,
    facts_of,
)
from trainer.verify.diagnosis import Diagnosis, diagnose

NO_LIMIT = 2**20
"""Positions of a model whose config.json does not say them."""

STDERR = 2

STALE_PREFIX = "prefix cache kept over the update"
SOME_WORKERS = "one of several workers"
RAW, UNAPPLIED = "raw log-probs", "temperature ignored"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The engine's answers, by what they are for."""

    by_temperature: dict[float, list[Sample]]
    long: list[Sample]
    cached: list[Sample]

    @property
    def every(self) -> list[Sample]:
        return [*(s for samples in self.by_temperature.values() for s in samples), *self.long, *self.cached]


def audit(options: Options) -> tuple[dict[str, Any], list[Finding]]:
    """What the audit is about, and its findings.

    Raises:
        ConfigError: an option, the checkpoint, adapters or the command of an update are of no use.
        InstanceError: the engine does not answer, or with something else than responses.
    """
    files = find_files(options.checkpoint, "--checkpoint")
    dtype = options.dtype or meant_dtype(files)
    words = read_words(files)
    engine = Engine(options.engine, options.timeout_s, options.token, options.model)
    engine.find(words.texts[0][:4] if words.texts else [1, 2, 3])
    exact = load_exact(files, dtype, options.device)
    if options.adapter is not None:
        put_adapters(exact, read_adapter(options.adapter, exact, files, "--adapter"))
    before = Before.read(options, exact, files, dtype)
    probes = make_probes(
        [*words.texts, words.chat or ()],
        exact.vocab_size,
        min(engine.max_length or NO_LIMIT, files.max_positions or NO_LIMIT),
        needed_length(files.config),
        TEMPERATURES if options.temperature is None else (options.temperature,),
        frozenset(words.ends),
    )
    recorded = ask(engine, probes, options)
    auditor = Auditor(exact, dtype, words, before, recorded)
    findings = auditor.findings()
    about = {
        "engine": engine.url,
        "route": engine.route,
        "checkpoint": options.checkpoint,
        "adapter": None if options.adapter is None else str(options.adapter),
        "before": None if options.before is None else str(options.before),
        "dtype": dtype,
        "num_tokens": tokens_in(recorded.every),
    }
    findings += [
        check_text(engine, TEXTS[0], words.texts[0], words.bos)
        if words.texts
        else not_tested("tokens of a text", "the checkpoint has no tokenizer"),
        check_chat(engine, MESSAGES, words.chat, words.bos),
    ]
    if auditor.ends or not words.ends:
        findings.append(check_ends(engine, auditor.ends, words.ends))
    return about, findings


def ask(engine: Engine, probes: Probes, options: Options) -> Recorded:
    """Sends all probes; with a command for the update, the cached ones before it, too."""
    if options.update_via is not None:
        engine.ask([replace(each, max_tokens=1) for each in probes.cached])
        update(options.update_via, options.timeout_s)
    cached = engine.ask(probes.cached) if options.update_via is not None else []
    # All at once, which an engine answers sooner than one temperature after the other.
    answers = iter(engine.ask([ask for asks in probes.by_temperature.values() for ask in asks]))
    by_temperature = {degrees: list(islice(answers, len(asks))) for degrees, asks in probes.by_temperature.items()}
    return Recorded(by_temperature, engine.ask(probes.long), cached)


def update(command: str, timeout_s: float) -> None:
    """Runs the user's command, which gives the engine the checkpoint's weights. What it prints goes to standard error;
    it may leave processes, such as an engine that it starts again.

    Raises:
        ConfigError: it cannot be run, fails or takes too long; then its processes are killed.
    """
    named = f"--update-via {command!r}"
    try:
        words = shlex.split(command)
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=STDERR, stderr=STDERR, start_new_session=True
        )
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{named} cannot be run: {error}; give a program with arguments, or sh -c '...'") from error
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{named} has not ended after {timeout_s:g} s, and was killed: it has to end once the engine has the new "
            "weights; raise --timeout-s if it needs longer"
        ) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise ConfigError(f"{named} ended with exit code {code}, expected 0; what it printed is above")


class _Kept:
    """Implements `diagnosis.Hypotheses` for samples whose logits are kept: temperatures cost no further pass."""

    def __init__(self, samples: Sequence[Sample], logits: Mapping[Sample, torch.Tensor]) -> None:
        self._samples = samples
        self._logits = logits

    def logprobs_at(self, temperature: float) -> torch.Tensor:
        rows = [token_logprobs(self._logits[sample], sample.tokens, temperature) for sample in self._samples]
        return torch.cat(rows)

    def with_first_head(self) -> None:
        return None

    def in_other_dtype(self) -> torch.Tensor:
        # Hypotheses of rounding follow.
        return torch.full((tokens_in(self._samples),), torch.nan, dtype=torch.float64)


class Auditor:
    """Judges what was recorded."""

    def __init__(self, exact: ExactModel, dtype: str, words: Words, before: Before, recorded: Recorded) -> None:
        self._exact = exact
        self._dtype = dtype
        self._words = words
        self._before = before
        self._recorded = recorded
        self._limits = NoiseLimits(noise_scale(dtype))
        self.ends: list[tuple[float, tuple[int, ...]]] = []
        """As `Facts.ends`."""

    def findings(self) -> list[Finding]:
        vocabulary = check_vocabulary(self._recorded.every, self._exact.vocab_size)
        if vocabulary.outcome == "fails":
            # Nothing scores such a token.
            return [vocabulary]
        found = [vocabulary]
        for place, (temperature, samples) in enumerate(self._recorded.by_temperature.items()):
            found += self._of_temperature(temperature, samples, is_main=place == 0)
        found.append(self._long(found))
        found.append(self._cached(found))
        return found

    def _of_temperature(self, temperature: float, samples: Sequence[Sample], *, is_main: bool) -> list[Finding]:
        check = f"log-probs at temperature {temperature:g}"
        kept = few(samples, 2 * MIN_TOKENS)
        facts = facts_of(self._exact, samples, self._words.ends, NUM_SORTED if is_main else 0, kept)
        own = _Kept(kept, facts.logits)
        self.ends += facts.ends
        evidence = Evidence(samples, facts.logprobs_N, reported(samples), self._limits)
        bound = self._bound(len(evidence.reported_N))
        if tokens_in(samples) < MIN_TOKENS:
            return [not_tested(check, f"{tokens_in(samples)} tokens, of {MIN_TOKENS} that are needed")]
        said = diagnose(reported(kept), own, self._limits, temperature, self._dtype)
        if said.cause == "temperature" and not said.is_of_sampling:
            shown = f"they are those of temperature {said.temperature:.3g}"
            return [fails(check, shown, bound, cause=self._named(said, temperature, kept, own))]
        found = self._explained(evidence, is_main=is_main)
        if found is not None:
            return [fails(check, found.detail, bound, cause=found.cause)]
        shown = f"RMS {evidence.rms:.2g} of {len(evidence.reported_N)} tokens"
        likeliest = said.temperature if said.is_of_sampling else None
        return [
            holds(check, shown, bound),
            check_draws(facts, evidence.reported_N, temperature, likeliest),
        ]

    def _named(self, said: Diagnosis, temperature: float, samples: Sequence[Sample], own: _Kept) -> str:
        """A temperature that is not applied, to the log-probs or to the draws."""
        if said.temperature is None or abs(said.temperature - 1) > 0.01:
            return "log-probs of another temperature"
        facts = facts_of(self._exact, [replace(sample, temperature=1.0) for sample in samples])
        found = check_draws(facts, reported(samples), 1.0, None)
        colder, plain = (float(own.logprobs_at(t).sum()) for t in (temperature, 1.0))
        return UNAPPLIED if found.outcome != "fails" and plain > colder else RAW

    def _explained(self, evidence: Evidence, *, is_main: bool) -> Explanation | None:
        """What is at fault; None where the log-probs are the checkpoint's."""
        if evidence.is_sound:
            # Limits in float32 have no room for a hypothesis.
            if not is_main or self._dtype == "float32":
                return None
            first = Explainer(self._exact, Evidence.of(self._exact, few(evidence.samples), self._dtype))
            self._try_all(first)
            # The nearest is looked at again by all tokens.
            every = Explainer(self._exact, evidence)
            every.try_all([first.best.hypothesis] if first.best else [])
            return every.explanation
        are_wide = wide_responses(evidence)
        wrong = [sample for sample, is_wide in zip(evidence.samples, are_wide, strict=True) if is_wide]
        right = [sample for sample, is_wide in zip(evidence.samples, are_wide, strict=True) if not is_wide]
        if not _is_mixed(evidence.samples, are_wide):
            return self.explain(evidence.samples)
        found = self.explain(wrong)
        if not self._is_right(right, wrong, found):
            return self.explain(evidence.samples)
        share = f"{len(wrong)} of {len(are_wide)} responses, also of prompts whose other responses are right"
        return Explanation(f"{SOME_WORKERS}: {found.cause}", f"{share}: {found.detail}")

    def explain(self, samples: Sequence[Sample]) -> Explanation:
        """What the engine that gave these computes with."""
        evidence = Evidence.of(self._exact, few(samples), self._dtype)
        explainer = Explainer(self._exact, evidence)
        self._try_all(explainer)
        self._try_sets(explainer)
        if (found := explainer.explanation) is not None:
            return found
        detail = f"{evidence.distance():.3g} nats per token from the checkpoint, and nothing explains it"
        if explainer.best is not None:
            detail += f"; the nearest is {explainer.best.hypothesis.name}, {explainer.best.distance:.3g} away"
        return Explanation(OTHER_WEIGHTS, detail)

    def _try_all(self, explainer: Explainer) -> None:
        explainer.try_all(self._before.hypotheses(self._exact))
        explainer.try_all(hypotheses(self._exact, self._dtype, self._words.bos))

    def _try_sets(self, explainer: Explainer) -> None:
        exact = self._exact
        if exact.adapters:
            for units in units_of_adapters(exact):
                explainer.try_sets(units, partial(_without, units))
        if self._before.values is not None:
            for parts in units_of_before(exact, self._before.values):
                explainer.try_sets(parts, partial(_stale, parts))

    def _is_right(self, right: Sequence[Sample], wrong: Sequence[Sample], found: Explanation) -> bool:
        """Whether the checkpoint is clearly nearer to some responses than to others, which the fault of these does not
        explain, too."""
        here, there = (Evidence.of(self._exact, few(samples), self._dtype) for samples in (right, wrong))
        scored_N = None if found.hypothesis is None else found.hypothesis.score(self._exact, here.samples)
        is_apart = scored_N is None or here.sigmas(scored_N) < 0
        return is_apart and here.distance() * CLEARLY < there.distance()

    def _long(self, found: Sequence[Finding]) -> Finding:
        check = "long prompts"
        if not self._recorded.long:
            return not_tested(check, "no window, no scaled rope")
        if any(finding.outcome == "fails" for finding in found):
            return not_tested(check, "short ones have wrong log-probs, too")
        evidence = Evidence.of(self._exact, self._recorded.long, self._dtype)
        length = len(self._recorded.long[0].prompt)
        bound = f"at most {len(self._recorded.long) - 1} responses wide"
        if not all(wide_responses(evidence)):
            return holds(check, f"RMS {evidence.rms:.2g} after {length} tokens", bound)
        explainer = Explainer(self._exact, evidence)
        explainer.try_all(hypotheses(self._exact, self._dtype, self._words.bos))
        best = explainer.best
        cause = OTHER_WEIGHTS if best is None else best.hypothesis.name
        return fails(check, f"RMS {evidence.rms:.2g} after {length} tokens", bound, cause=cause)

    def _cached(self, found: Sequence[Finding]) -> Finding:
        check = "prefixes from before the update"
        if not self._recorded.cached:
            return not_tested(check, "needs --update-via")
        evidence = Evidence.of(self._exact, self._recorded.cached, self._dtype)
        bound = self._bound(len(evidence.reported_N))
        if any(finding.outcome == "fails" for finding in found):
            return not_tested(check, "the log-probs of new prompts are wrong, too")
        if not evidence.is_sound:
            return fails(check, f"RMS {evidence.rms:.2g}, new prompts hold", bound, cause=STALE_PREFIX)
        return holds(check, f"RMS {evidence.rms:.2g} of {len(evidence.reported_N)} tokens", bound)

    def _bound(self, num_tokens: int) -> str:
        rms, mean = self._limits.largest_rms(num_tokens or 1), self._limits.largest_mean(num_tokens or 1)
        return f"RMS {rms:.2g}, mean {mean:.2g}"


def _is_mixed(samples: Sequence[Sample], are_wide: Sequence[bool]) -> bool:
    """Whether several prompts have both kinds of responses: no fault of all workers does that."""
    by_prompt: dict[tuple[int, ...], set[bool]] = {}
    for sample, is_wide in zip(samples, are_wide, strict=True):
        by_prompt.setdefault(sample.prompt, set()).add(is_wide)
    return sum(len(kinds) == 2 for kinds in by_prompt.values()) >= 2


def _without(units: dict[str, list[str]], chosen: Sequence[str]) -> Hypothesis:
    left_out = {layer for unit in chosen for layer in units[unit]}
    return of_shares(
        f"adapters: all but those of {' and '.join(sorted(chosen))}", lambda layer: 0.0 if layer in left_out else 1.0
    )


def _stale(units: dict[str, Values], chosen: Sequence[str]) -> Hypothesis:
    name = f"stale {' and '.join(sorted(chosen))}"
    return by_weights(name, {key: value for unit in chosen for key, value in units[unit].items()})
