"""What an engine computes with in place of the adapters that it received alone, by name; `canary.py` calls it.

First the trainer computes what the engine's log-probs would be with what is often wrong. Where none of it comes near,
further publishes go to that engine alone. One is the same as before, in which an older version is right; in others all
ranks, layers or values of the factors are alike, which are right in whatever order an engine has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from async_rl.rollouts.publish.trial_request import Samples
from async_rl.shared.protocol.adapter import A, B
from async_rl.shared.protocol.sender import ALIKE, ALL_STRENGTHS, CONSTANT, SCALE, SenderFacts

Changes = Mapping[str, int | None]
"""Strengths of classes otherwise than a publish of the canary has them; None: as before the canary."""

SCALES = (10, 25, 50, 75, 90, 110, 125, 150, 200, 300, 400, 800, 1600)
"""Multiples of adapters' scale, in percent, between which others are looked for."""

NONE = "none"
IN_ANOTHER_ORDER = {
    ALIKE[0]: "their ranks in another order",
    ALIKE[1]: "those of other layers",
    ALIKE[2]: "their values in another order",
}


@dataclass(frozen=True, slots=True)
class Trials:
    """How the engine's log-probs compare with the trainer's; distances are in nats per token."""

    facts: SenderFacts
    strengths: Mapping[str, int]
    """Of the classes in the publish that it got wrong."""
    own: Samples
    """What it sampled then."""
    distance: Callable[[Samples, Changes], float]
    """Of samples from what the trainer computes with these changes."""
    publish: Callable[[Changes], Samples]
    """Publishes to the engine alone, and samples from it."""
    agrees: Callable[[float], bool]
    """Whether a distance is one of an engine that computes with what it is compared with."""
    is_near: Callable[[float], bool]
    """Whether a distance of `own` is clearly less than from what was sent."""
    locate: Callable[[], Sequence[str]]
    """The classes of the kinds of layers without whose adapters it agrees, by publishes; none if there are none."""

    def fault(self) -> str | None:
        """What it computes with, such as "an older version of all"; None if nothing explains it."""
        none: dict[str, Changes] = {NONE: dict.fromkeys(self.facts.classes, CONSTANT)}
        known = self._nearest({**none, **dict(self._at_scales()), **dict(self._without_layers())})
        if known is not None and known != NONE:
            return known
        # One that is a version behind has none at first.
        if self._is_right({}):
            return self._older()
        if known is not None:
            return known
        for alike, fault in IN_ANOTHER_ORDER.items():
            if self._is_right({alike: 1}):
                return fault
        kinds = dict.fromkeys(name.partition(" ")[0] for name in self.locate())
        matrices = [name for name in self._layers() if name.rpartition(".")[2] in kinds]
        without_one = {f"all but those of {name}": {name: CONSTANT} for name in matrices}
        return self._nearest(without_one) or (f"other ones of {' and '.join(kinds)}" if kinds else None)

    def _is_right(self, changes: Changes) -> bool:
        return self.agrees(self.distance(self.publish(changes), changes))

    def _nearest(self, candidates: Mapping[str, Changes]) -> str | None:
        distances = {name: self.distance(self.own, changes) for name, changes in candidates.items()}
        name = min(distances, key=distances.__getitem__, default=None)
        return name if name is not None and self.is_near(distances[name]) else None

    def _at_scales(self) -> Iterator[tuple[str, Changes]]:
        """The scale that comes nearest."""
        assert self.facts.adapter is not None, "these are adapters"

        def far(percent: int) -> float:
            return self.distance(self.own, {SCALE: percent})

        best = min((*SCALES, 100 * self.facts.adapter.rank), key=far)
        step = best // 4
        while step:
            best = min((best - step, best, best + step), key=far)
            step //= 2
        if best != 100:
            yield f"all multiplied by {best / 100:g}", {SCALE: best}

    def _without_layers(self) -> Iterator[tuple[str, Changes]]:
        """One of several layers left out."""
        layers = dict.fromkeys(".".join(name.split(".")[:3]) for name in self._layers())
        if len(layers) > 1:
            yield from ((f"all but those of {layer}", {layer: CONSTANT}) for layer in layers)

    def _layers(self) -> Sequence[str]:
        """Such as "model.layers.0.self_attn.q_proj"."""
        assert self.facts.adapter is not None, "these are adapters"
        names = (name.removeprefix("base_model.model.").removesuffix(".weight") for name in self.facts.adapter.names)
        return list(dict.fromkeys(name.rpartition(".")[0] for name in names))

    def _older(self) -> str:
        """Which factors are those of the publish before: the next one has others of all."""
        others = {name: strength % ALL_STRENGTHS + 1 for name, strength in self.strengths.items()}
        samples = self.publish(others)
        kinds = {"all": ("",), A: (A,), B: (B,), **{name: (name,) for name in others}}
        stale = {
            f"an older version of {what}": {name: others[name] for name in others if not name.endswith(ends)}
            for what, ends in kinds.items()
        }
        distances = {name: self.distance(samples, changes) for name, changes in stale.items()}
        return min(distances, key=distances.__getitem__)
