"""The modules that tell whether an extra is installed, against the packages that pyproject.toml names for it."""

import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from async_rl.errors import ConfigError
from async_rl.shared.programs import extras
from tests.support import ROOT

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# In environments of their own, where tests/async_rl/records/test_real_trackers.py and
# tests/deploy/local/test_harness.py use them.
ELSEWHERE = {"wandb", "mlflow", "trackio", "harness"}


@pytest.mark.parametrize("extra", sorted(extras.MODULES.keys() - ELSEWHERE))
def test_modules_are_those_of_the_packages_that_the_extra_names(extra: str) -> None:
    providers = packages_distributions()
    provided = {canonicalize_name(name) for module in extras.MODULES[extra] for name in providers[module]}
    assert provided == {canonicalize_name(Requirement(line).name) for line in DECLARED[extra]}


def test_what_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MODULES, "serve", ("no_such_module", "json"))
    monkeypatch.setitem(extras.MODULES, "vllm", ("json",))
    with pytest.raises(ConfigError, match=r"a program needs no_such_module, .*'async-rl\[serve\]'"):
        extras.require_extras("a program", "serve", "vllm")
    extras.require_extras("a program", "vllm")
