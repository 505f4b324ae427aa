"""A measured run as if something were different: its costs, who waits for whom, or what a publish sends."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from async_rl.errors import ConfigError
from async_rl.records.run_records import object_in
from deploy.scaling.costs import Measured
from deploy.scaling.iterations import LARGEST
from deploy.scaling.publish import (
    DELAY_S,
    FINDING_S,
    ONCE_S,
    PIECE_BYTES,
    PIECE_S,
    Member,
    chain,
    publish_s,
    star,
    tree,
)
from deploy.scaling.simulation import Costs

LEAST = 1e-9
"""Seconds, hours and GiB: less is none of a run, and what is divided by it is no number."""

SWITCHES = ("dock", "tail")

MOST_CHANGES = 0.5
"""Of the bytes: `publish.transport = "changes"` sends all where more have changed."""


def with_costs(run: Measured, given: Sequence[str]) -> Measured:
    """The run as if these costs, NAME=SECONDS, were what it has.

    Raises:
        ConfigError: there is no such cost, or no such number.
    """
    costs: dict[str, float] = {}
    for word in given:
        name, _, text = word.partition("=")
        if name in costs:
            raise ConfigError(f"--cost {word!r}: {name} is {costs[name]:g} already: give each cost once")
        least = 1.0 if name.startswith("slower_") else 0.0
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (name in asdict(run.costs) and least <= value <= LARGEST and not 0 < value < LEAST):
            raise ConfigError(
                f"--cost {word!r}: expected NAME=NUMBER, 0 or more seconds, or a factor of 1 or more; the names are "
                f"{', '.join(asdict(run.costs))}"
            )
        costs[name] = value
    if not any(value for name, value in {**asdict(run.costs), **costs}.items() if not name.startswith("slower_")):
        raise ConfigError("--cost leaves nothing that takes time: leave one out")
    return replace(run, costs=replace(run.costs, **costs), others=tuple(replace(each, **costs) for each in run.others))


def without(run: Measured, switches: Sequence[str]) -> Measured:
    """The run with fixed shares, of these `SWITCHES`.

    Raises:
        ConfigError: it has them itself.
    """
    if "dock" in switches and not run.set_up.has_dock:
        raise ConfigError(
            '--without dock: the run has none, as train.order is "prompt" or prompts.reserve is set: leave it out'
        )
    set_up = replace(run.set_up, has_dock=run.set_up.has_dock and "dock" not in switches)
    return replace(run, set_up=replace(set_up, has_tail="tail" not in switches))


class Changes(NamedTuple):
    """Seconds of a publish to the run's own instances, of all weights and of what has changed."""

    all_s: float
    changes_s: float

    @property
    def are_sent(self) -> bool:
        """Whichever takes less time is sent."""
        return self.changes_s <= self.all_s

    @property
    def text(self) -> str:
        what = "changes" if self.are_sent else "all weights"
        return f"a publish of changes takes {self.changes_s:.3g} s, of all weights {self.all_s:.3g} s: {what} are sent"


def with_changes(run: Measured, run_dir: Path, share: float) -> tuple[Measured, Changes]:
    """The run as if it could publish this part of its bytes, those that have changed, and found them first.

    Raises:
        ConfigError: its publishes are not such as could send changes, or their bytes are not known.
    """
    config = object_in(run_dir / "config.json")
    keys = (("publish", "transport"), ("inference", "engine"))
    transport, engine = (config.get(section, {}).get(key) for section, key in keys)
    if transport != "broadcast" or engine == "vllm" or not run.chained_bytes:
        raise ConfigError(
            f"--changes {share:g}: {str(run_dir)!r} has publish.transport {transport!r}, inference.engine {engine!r}, "
            f"and publishes of {run.chained_bytes:,.0f} bytes: expected a run with 'broadcast', an engine that can "
            "take changes, which 'vllm' cannot, and publish_bytes in its records"
        )

    def changed(costs: Costs) -> Costs:
        once_s = min(ONCE_S, costs.publish_s)
        sent_s = share * (costs.publish_s - once_s)
        return replace(
            costs,
            publish_s=once_s + sent_s + FINDING_S * run.chained_bytes,
            passing_s=min(costs.passing_s, sent_s + PIECE_S + DELAY_S),
        )

    number = run.set_up.num_instances
    found = Changes(*(costs.publish_to_s(number) for costs in (run.costs, changed(run.costs))))
    if found.are_sent:
        others = tuple(map(changed, run.others))
        run = replace(run, costs=changed(run.costs), others=others, chained_bytes=share * run.chained_bytes)
    return run, found


def ways_of(run: Measured, num_instances: int) -> dict[str, float]:
    """Seconds of a publish to so many instances: through a chain, as it is; and where its bytes took some of its time,
    as it would be through a tree, and to one after the other."""
    ways = {"chain": run.costs.publish_to_s(num_instances)}
    num_pieces = max(1, math.ceil(run.chained_bytes / PIECE_BYTES))
    piece_s = run.costs.passing_s - PIECE_S - DELAY_S
    if piece_s < LEAST:
        return ways
    # What a piece takes has the processor's part in it.
    members = [Member(run.chained_bytes / num_pieces / piece_s, piece_s=min(PIECE_S, piece_s))] * (1 + num_instances)
    once_s = run.costs.publish_s - publish_s(chain(1), members[:2], run.chained_bytes)
    others = {"tree": tree, "star": star}
    return ways | {
        name: once_s + publish_s(of(num_instances), members, run.chained_bytes) for name, of in others.items()
    }
