"""Checks a config, its model, algorithm, data and reward before a run's processes start; reports all errors together.

It is fast by design: it imports neither torch nor transformers, reads the first rows only, and executes nothing of a
reward. `trial.py` has the slower checks of `async-rl check`; the trainer measures every prompt before it trains.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_rl.checks.preflight.adapter import require_adapters
from async_rl.checks.preflight.data import require_evaluation_sets, require_prompts
from async_rl.checks.preflight.layout import require_layout
from async_rl.checks.preflight.model import CRITIC, TEACHER, ModelFiles, require_other_models, require_trainable
from async_rl.checks.preflight.model_room import require_fit, require_tokens
from async_rl.checks.preflight.resume import require_resumable
from async_rl.checks.preflight.reward import require_reward, require_time_for_tests
from async_rl.checks.preflight.reward_rows import require_answers, require_columns, require_parts_of_rows
from async_rl.checks.preflight.train_modes import require_exact, require_router_replay
from async_rl.checks.preflight.user_file import require_algorithm, require_nodes, require_program
from async_rl.checks.preflight.vllm_models import require_vllm
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.records.records import require_no_records
from async_rl.shared.locks.run_lock import require_unlocked

__all__ = ["Fault", "find_faults", "find_missing_files", "require_sound"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One error of a config; `is_of_place`: in files or directories that another machine may have."""

    error: ConfigError
    is_of_place: bool


def require_sound(config: Config, *, trains: bool, serves: bool, num_ranks: int | None = None) -> None:
    """Runs all checks that are possible before a start.

    Args:
        trains: whether a trainer is started, and not only an evaluation.
        serves: whether instances are started, which get the longest prompt and response that they must accept; if they
            are running already, the trainer compares the longest actual prompt with their limits.
        num_ranks: the training ranks, if they are started by hand; by default those that the config says.

    Raises:
        ConfigError: with one line for each error.
    """
    faults = find_faults(config, trains=trains, serves=serves, num_ranks=num_ranks)
    if len(faults) == 1:
        # Of its own class: a directory in use may be free later.
        raise faults[0].error
    if faults:
        raise ConfigError("\n".join(str(fault.error) for fault in faults))


def find_faults(
    config: Config, *, trains: bool, serves: bool, is_whole: bool = True, num_ranks: int | None = None
) -> list[Fault]:
    """What `require_sound` would raise, one by one.

    Args:
        is_whole: without it models may be a config.json alone; `find_missing_files` has what they lack.
    """
    faults: list[Fault] = []
    ranks = num_ranks or config.trainer.num_local_ranks * config.cluster.training_nodes

    def note(check: Callable[[], None], *, is_of_place: bool = False) -> None:
        error = _error_of(check)
        if error is not None:
            faults.append(Fault(error, is_of_place))

    note(lambda: _require_model(config, trains, serves, is_whole, ranks))
    note(lambda: require_reward(config.reward))
    note(lambda: require_program(config.rollout))
    note(lambda: require_evaluation_sets(config), is_of_place=True)
    note(lambda: require_parts_of_rows(config, trains=trains), is_of_place=True)
    note(lambda: require_answers(config, trains=trains), is_of_place=True)
    note(lambda: require_columns(config, trains=trains), is_of_place=True)
    if trains:
        note(lambda: require_prompts(config.prompts), is_of_place=True)
        note(lambda: require_time_for_tests(config))
        note(lambda: require_algorithm(config.algorithm))
        note(lambda: require_nodes(config.pipeline))
        note(lambda: require_paths(config), is_of_place=True)
        note(lambda: require_resumable(config), is_of_place=True)
    return faults


def find_missing_files(config: Config) -> list[ConfigError]:
    """What the directories of a run's models lack beside config.json: weights, a tokenizer."""
    names = (
        (config.model.path, "model.path"),
        (config.algorithm.teacher, TEACHER),
        (config.algorithm.critic.critic_path, CRITIC),
    )
    missing: list[ConfigError] = []
    for name, setting in names:
        if name is None or not _has_config(name):
            continue
        files = ModelFiles.find(name, setting, is_whole=False)
        missing += [error for error in (files.without_weights(), files.without_tokenizer()) if error is not None]
    return missing


def _has_config(name: str) -> bool:
    try:
        return (Path(name) / "config.json").is_file()
    except OSError:
        # `find_faults` names it.
        return False


def _require_model(config: Config, trains: bool, serves: bool, is_whole: bool, num_ranks: int) -> None:
    files = ModelFiles.find(config.model.path, is_whole=is_whole)
    checks: list[Callable[[], None]] = []
    if trains:
        checks.append(lambda: require_trainable(config, files, is_whole=is_whole))
        checks.append(lambda: require_vllm(config, files))
        checks.append(lambda: require_exact(config, files))
        checks.append(lambda: require_adapters(config, files))
        checks.append(lambda: require_router_replay(config, files))
        checks.append(lambda: require_other_models(config, files, num_ranks, is_whole=is_whole))
        checks.append(lambda: config.require_prompts_for(num_ranks))
        checks.append(lambda: require_layout(config.trainer, files.shape, num_ranks))
    if serves:
        checks.append(lambda: require_fit(config, files))
    checks.append(lambda: require_tokens(config, files))
    # What is wrong with config.json is found by more than one of them.
    faults = dict.fromkeys(str(error) for error in map(_error_of, checks) if error is not None)
    if faults:
        raise ConfigError("\n".join(faults))


def _error_of(check: Callable[[], None]) -> ConfigError | None:
    try:
        check()
    except ConfigError as fault:
        return fault
    except OSError as error:
        # A path that is too long, or below a directory that may not be read.
        return ConfigError(f"{error.filename!r} cannot be read: {error.strerror}; name another path")
    return None


def require_paths(config: Config) -> None:
    """Checks `run.dir` and `publish.snapshot_dir`; creates none of them.

    Raises:
        ConfigError: one cannot be created or written, or `run.dir` has records of another run, or is in use by one.
    """
    _require_directory("run.dir", config.run.dir)
    require_unlocked(config.run.dir)
    require_no_records(config.run)
    if config.publish.snapshot_dir is not None:
        _require_directory("publish.snapshot_dir", config.publish.snapshot_dir)


def _require_directory(key: str, path: Path) -> None:
    """Checks that `path` is a directory that can be written to, or can be created."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"{key} is {str(path)!r}, but {str(existing)!r} is a file: name a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key} is {str(path)!r}, but {str(existing)!r} cannot be written to by this user: name another directory"
        )
