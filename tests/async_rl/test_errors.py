"""Of every error class it is decided whether a restart may help, and the tree in the docstring names it."""

import importlib
import pkgutil

import pytest

import async_rl
import async_rl.errors
from async_rl.errors import AsyncRLError

LASTING = {
    "WeightsRefused",
    "ConfigError",
    "Fenced",
    "FleetLost",
    "NonFiniteGradient",
    "OnPolicyViolation",
    "PromptFailed",
    "RequestInvalid",
    "RewardError",
    "RestartsExhausted",
    "NodeFailed",
    "RolloutFailed",
    "RunStopped",
    "UnknownInstance",
    "UpdatesRoundedAway",
    "WriteFailed",
}
"""The same input gives the same error again, or nothing is left to be restarted."""


NEED_OTHER_PACKAGES = {f"async_rl.records.trackers.{name}_tracker" for name in ("mlflow", "trackio", "wandb")}
NEED_OTHER_PACKAGES |= {"async_rl.evaluation.harness"}

STARTS_PROCESSES = {"async_rl.rollouts.rewards.reasoning_gym"}
"""Through matplotlib, which lists the machine's fonts when it is first imported there."""


def classes(kind: type[AsyncRLError]) -> set[type[AsyncRLError]]:
    return {kind}.union(*map(classes, kind.__subclasses__()))


@pytest.fixture(scope="module")
def everything() -> set[type[AsyncRLError]]:
    for module in pkgutil.walk_packages(async_rl.__path__, "async_rl."):
        if module.name in NEED_OTHER_PACKAGES | STARTS_PROCESSES:
            continue
        importlib.import_module(module.name)
    return {kind for kind in classes(AsyncRLError) if kind.__module__.startswith("async_rl.")}


def test_exactly_these_errors_no_restart_mends(everything: set[type[AsyncRLError]]) -> None:
    assert {kind.__name__ for kind in everything if not kind.may_pass} == LASTING


def test_the_tree_names_every_class_of_the_module(everything: set[type[AsyncRLError]]) -> None:
    own = {kind.__name__ for kind in everything if kind.__module__ == "async_rl.errors"}
    words = set((async_rl.errors.__doc__ or "").replace("├──", " ").replace("└──", " ").replace("│", " ").split())
    assert own <= words
