"""Whether a run may resume from a checkpoint: the inputs that determine its results must be those of the saved run.

These are settings, the prompts, the reward, and a user's own algorithm. Where and how the results are computed may
change: the layout of the trainer, the pool, publishing, checkpoints, `run.dir`; so may limits that only end a run, how
often a reward is tried, and the learning rate. `train.iterations` and `train.epochs` may change too, which
moves the end of the learning rate's decay.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from async_rl.checks.preflight.model import CRITIC, ModelFiles
from async_rl.config.file import parse_config
from async_rl.config.keys import set_dotted
from async_rl.config.other_names import EARLIER
from async_rl.config.reward_section import OPTIONS as REWARD_OPTIONS
from async_rl.config.reward_section import RewardSettings
from async_rl.config.section import NoOptions
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.checkpoint_names import MANIFEST, checkpoints_dir, newest_checkpoint

log = logging.getLogger(__name__)

_DECIDING = ("model", "prompts", "rollout", "reward", "algorithm", "adapter", "optimizer", "train")
_MAY_CHANGE = {
    *("train.iterations", "train.epochs", "train.logprob_noise", "train.exact"),
    *("reward.timeout_s", "reward.num_workers", "reward.max_concurrency", "reward.max_attempts"),
    *("reward.options.token_from", "reward.options.correct_at", "reward.correct_at"),
    *("rollout.options.num_workers", "rollout.options.max_concurrent", "rollout.options.max_attempts"),
    "rollout.options.gateway_host",
    *("optimizer.learning_rate", "optimizer.schedule", "optimizer.min_learning_rate_ratio"),
    "optimizer.warmup_iterations",
    "algorithm.options.critic_learning_rate",
    # Read where there is no checkpoint.
    "adapter.path",
    "adapter.publish",
}
_NEVER_CHANGE = ("adapter.rank", "adapter.targets")
"""What says which tensors a checkpoint has."""
_OF_A_START = {"run.dir", "run.resume", "run.accept_changes", "pool.instances"}
"""Others at every start."""

_PLACES = {"prompts.source", "prompts.mixture.source", "reward.name", "reward.options.rubric", "rollout.program"}
"""Settings that locate contents; they may differ where the contents are known to be the same."""

_PARTS = "reward.parts."

MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents behind a run's settings: digests of ranges of its prompts, and the identity of its reward.

    `algorithm` is that of a user's own one, "" for a built-in one; `base` that of the weights below adapters, which the
    checkpoint does not have, "" without adapters; `critic_base` the same of a critic with a checkpoint of its own.
    `shape` is what `model.path` says of the policy: the same weights may be another model with another config.json.
    """

    prompts: Mapping[str, str]
    reward: str
    algorithm: str = ""
    base: str = ""
    critic_base: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


OfAlgorithm = Callable[[Config], Mapping[str, Any]]
"""The settings of the built-in algorithm of a config, dotted, with the values that it has for those left to it."""


def deciding_settings(config: Config, of_algorithm: OfAlgorithm | None) -> dict[str, Any]:
    """Dotted key -> value, of the settings that determine what a run computes.

    Those that are left to the algorithm are left out without `of_algorithm`, which needs torch.
    """
    settings = {
        key: value
        for key, value in _flat(config.model_dump(mode="json")).items()
        if key.partition(".")[0] in _DECIDING and not key.startswith("reward.")
    }
    settings["run.seed"] = config.run.seed
    settings["adapter.targets"] = config.adapter.sorted_targets
    if of_algorithm is None:
        settings = {key: value for key, value in settings.items() if value is not None or "algorithm." not in key}
    elif not config.algorithm.is_own:
        settings |= of_algorithm(config)
    mixture = settings["prompts.mixture"]
    settings["prompts.mixture"] = [{key: value for key, value in p.items() if key != "source"} for p in mixture]
    settings["prompts.mixture.source"] = [part["source"] for part in mixture]
    settings["pipeline.nodes"] = [[node.name, list(node.reads), node.written] for node in config.pipeline.nodes]
    reward = config.reward
    settings |= _reward_settings("reward.", reward, reward) | {"reward.parts": list(reward.weights)}
    for part in reward.parts:
        settings |= _reward_settings(f"{_PARTS}{part.known_as}.", part, reward.single_rewards[part.known_as])
    return {key: value for key, value in settings.items() if _setting(key) not in _MAY_CHANGE}


def with_todays_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config with the keys that have moved since, and kept their meaning, where they are now; without those
    that are gone and decided nothing, or had nothing to say. Two lists that are one now are put together."""
    tree: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for section, keys in saved.items():
        tree.setdefault(section, {})
        for key, value in keys.items():
            name = f"{section}.{key}"
            moved = EARLIER.get(name)
            if moved and (section not in _DECIDING or not value or name in _MAY_CHANGE):
                continue
            if name == "reward.parts":
                value = [{key: part[key] for key in part if f"reward.{key}" not in EARLIER} for part in value]
            now = moved.keys[0] if moved and len(moved.keys) == 1 and not moved.note else name
            values[now] = [*values.get(now, ()), *value] if isinstance(value, list) else value
    for name, value in values.items():
        set_dotted(tree, name, value)
    return tree


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of a config as JSON, with each option of algorithm and program as a key of its own."""
    settings = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    for table in ("algorithm.options", "rollout.options"):
        settings |= {f"{table}.{key}": value for key, value in settings.pop(table, {}).items()}
    return settings


def _reward_settings(prefix: str, reward: RewardSettings, alone: RewardSettings) -> dict[str, Any]:
    """Of a reward or a part of it, which `alone` is with what it takes over, and the options of its kind one by one."""
    kind = None if alone.name is None else REWARD_OPTIONS.get(alone.name, NoOptions)
    options = {} if kind is None else alone.read_options(kind).model_dump(mode="json")
    settings = reward.model_dump(mode="json", exclude={"options"}) | {f"options.{k}": v for k, v in options.items()}
    return {prefix + key: value for key, value in settings.items()}


def _setting(key: str) -> str:
    """A part of the reward has the settings of a reward."""
    if not key.startswith(_PARTS):
        return key
    label, _, name = key.rpartition(".")
    return f"reward.options.{name}" if label.endswith(".options") else f"reward.{name}"


def require_same_run(
    saved: dict[str, Any],
    config: Config,
    checkpoint: str,
    saved_contents: Mapping[str, Any] | None = None,
    contents: Contents | None = None,
    *,
    of_algorithm: OfAlgorithm,
) -> None:
    """Checks that a checkpoint with the config `saved` (as JSON) is one of a run with `config`.

    Args:
        saved_contents: the run's contents when it was saved, as JSON; without them, settings alone are compared.
        contents: the run's contents now.
        of_algorithm: see `setting_changes`.

    Raises:
        ConfigError: it is not one, and `run.accept_changes` is not set; names everything that differs.
    """
    saved = with_todays_names(saved)
    differing: list[str] = []
    same_places: set[str] = set()
    if saved_contents is not None and contents is not None:
        differing = content_changes(saved_contents, contents)
        same_places = set() if differing else _PLACES | _place_of_algorithm(saved_contents, contents)
    differing += setting_changes(saved, config, checkpoint, same_places, of_algorithm)
    _say_what_may_change(saved, config)
    if not differing:
        return
    if config.run.accept_changes:
        log.warning("the run goes on, but not as it was (run.accept_changes):\n  %s", "\n  ".join(differing))
        return
    raise _other_run(checkpoint, differing)


def setting_changes(
    saved: dict[str, Any],
    config: Config,
    checkpoint: str,
    same_places: Collection[str],
    of_algorithm: OfAlgorithm | None = None,
) -> list[str]:
    """Which deciding settings are others than those of a saved config with today's names.

    Args:
        same_places: settings that may differ, since what they locate is the same.
        of_algorithm: without it, settings that either leaves to the algorithm are not compared.
    """
    was = parse_config(saved, source=f"the config in checkpoint {checkpoint!r}")
    before, now = deciding_settings(was, of_algorithm), deciding_settings(config, of_algorithm)
    return [
        f"{key} is {now.get(key)!r}, but was {before.get(key)!r}"
        for key in before | now
        if now.get(key) != before.get(key)
        and _setting(key) not in same_places
        and (of_algorithm is not None or (key in before and key in now))
    ]


def _other_run(checkpoint: str, differing: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"checkpoint {checkpoint!r} belongs to another run:\n  "
        + "\n  ".join(differing)
        + "\nset them back, give this run a directory of its own (run.dir), or set run.accept_changes = true"
    )


def _say_what_may_change(saved: Mapping[str, Any], config: Config) -> None:
    """Warns of settings that are others than the saved run's and decide nothing, or may change: the rate, limits, the
    layout. Where the run and its instances are differs at every start."""
    before, now = _flat(saved), _flat(config.model_dump(mode="json"))
    changes = [
        f"{key} is {value!r}, but was {before[key]!r}"
        for key, value in now.items()
        if key not in _OF_A_START
        and key in before
        and before[key] != value
        and (key.partition(".")[0] not in _DECIDING or key in _MAY_CHANGE)
    ]
    if changes:
        log.warning("settings have changed since the checkpoint:\n  %s", "\n  ".join(changes))


def content_changes(before: Mapping[str, Any], now: Contents) -> list[str]:
    """What is not as `before`, which is contents as JSON."""
    found: list[str] = []
    if before["prompts"].keys() != now.prompts.keys():
        found.append(f"the prompts are others: rows {_span(now.prompts)} are used, but were {_span(before['prompts'])}")
    elif changed := [rows for rows, digest in now.prompts.items() if before["prompts"][rows] != digest]:
        more = f" and {len(changed) - MAX_SHOWN} more stretches" if len(changed) > MAX_SHOWN else ""
        found.append(f"the prompts have changed somewhere in rows {', '.join(changed[:MAX_SHOWN])}{more}")
    if before["reward"] != now.reward:
        found.append(f"the reward is {now.reward}, but was {before['reward']}")
    if _place_of_algorithm(before, now) and before["algorithm"] != now.algorithm:
        found.append(f"the algorithm is {now.algorithm}, but was {before['algorithm']}")
    for key, setting, base in (("base", "model.path", now.base), ("critic_base", CRITIC, now.critic_base)):
        if base and before.get(key) and before[key] != base:
            found.append(other_base(setting, before[key], base))
    return [*found, *shape_changes(before.get("shape", {}), now.shape)]


def shape_changes(before: Mapping[str, Any], now: Mapping[str, Any], setting: str = "model.path") -> list[str]:
    """What a model is otherwise than `before`, of what is known of both; shapes as JSON."""
    return [
        f"the model's {name} is {now[name]!r}, but was {value!r} (config.json of {setting})"
        for name, value in before.items()
        if name in now and now[name] != value
    ]


def require_resumable(config: Config) -> None:
    """Checks what can be told of the newest checkpoint quickly: the trainer compares everything when it has started.

    Raises:
        ConfigError: it is of a run with other settings, or of another model; with `run.accept_changes`, of a run with
            other adapters.
    """
    newest = newest_checkpoint(checkpoints_dir(config.run.dir)) if config.run.resume else None
    if newest is None:
        return
    try:
        content = json.loads((newest / MANIFEST).read_bytes())["content"]
        saved = {section: dict(keys) for section, keys in content["config"].items()}
        before = dict(content.get("contents", {}).get("shape", {}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # The trainer says what is wrong with it, and which one is whole.
        return
    places = {*_PLACES, "algorithm.name"} if config.algorithm.is_own else _PLACES
    changes = setting_changes(with_todays_names(saved), config, str(newest), places)
    if config.run.accept_changes:
        if lasting := [change for change in changes if change.partition(" ")[0] in _NEVER_CHANGE]:
            raise ConfigError(
                f"checkpoint {str(newest)!r} has other adapters: {'; '.join(lasting)}; set that back, or give this run "
                "a directory of its own (run.dir)"
            )
        return
    changes += shape_changes(before, ModelFiles.find(config.model.path, is_whole=False).shape.as_json())
    if changes:
        raise _other_run(str(newest), changes)


def other_base(setting: str, before: str, now: str) -> str:
    """That the weights below a checkpoint's adapters are not those they were trained beside, by their digests."""
    return f"the weights of {setting}, beside which the adapters were trained, have the digest {now}, but had {before}"


def _place_of_algorithm(before: Mapping[str, Any], now: Contents) -> set[str]:
    """A user's own may lie elsewhere; a built-in one is its name."""
    return {"algorithm.name"} if before.get("algorithm") and now.algorithm else set()


def _span(digests: Mapping[str, str]) -> str:
    stretches = list(digests)
    return f"{stretches[0].split()[0]} to {stretches[-1].split()[-1]} ({len(stretches)} stretches)"
