"""A user's own algorithm is loaded from its file, and what is wrong with it is said."""

from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.checks.preflight.user_file import require_algorithm
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.errors import ConfigError
from async_rl.method.algorithms import PolicyGradient, make_algorithm
from tests.support import ROOT
from tests.support.algorithms import rollouts_of

IMPORT = "from async_rl.method.algorithms import PolicyGradient\n"


def named(folder: Path, text: str, name: str = "Mine") -> AlgorithmSection:
    (folder / "mine.py").write_text(text)
    return AlgorithmSection(name=f"python:{folder / 'mine.py'}:{name}")


def test_the_example_is_made_with_its_options() -> None:
    file = ROOT / "examples" / "algorithm" / "my_algorithm.py"
    section = AlgorithmSection(name=f"python:{file}:MedianBaseline", options={"below": 0.0}, clip_high=0.3)
    require_algorithm(section)
    algorithm = make_algorithm(section, 100)
    assert isinstance(algorithm, PolicyGradient) and algorithm.clip_high == 0.3
    advantages_G = algorithm.advantages(rollouts_of([0.0, 1.0, 3.0]), None)
    assert torch.equal(advantages_G, torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"has the options below: correct algorithm\.options\.above: Extra inputs"):
        make_algorithm(section.model_copy(update={"options": {"above": 1}}), 100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"algorithm\.name .*mine\.py has no class 'Mine'; it has \[\]"),
        ("def Mine(config, limit): ...", r"has no class 'Mine'; it has \[\]"),
        ("class Other: ...", r"has no class 'Mine'; it has \['Other'\]"),
        ("1 / 0", r"loading .*mine\.py failed:\n(.|\n)*ZeroDivisionError"),
        ("class Mine: ...", r"making it with \(config, max_response_tokens\) failed:\n(.|\n)*takes no arguments"),
        (
            "class Mine:\n    def __init__(self, config, limit): self.x = config.no",
            "failed:\n(.|\n)*line 2, in __init__",
        ),
        (
            "class Mine:\n    def __init__(self, config, limit): ...\n    needs = 1",
            "has no has_gradient, advantages, weights, sums, denominator, loss_sum, num_corrected: derive it from",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_algorithm(named(tmp_path, text), 100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (IMPORT + "def Mine(): ...", None),
        (IMPORT + "class Mine(PolicyGradient): ...", None),
        (IMPORT + "class Other(PolicyGradient): ...", r"algorithm\.name .*has no class 'Mine'; it has \['Other'\]"),
        ("import no_such_module", "line 1: there is no module 'no_such_module'"),
        ("class Mine(", "correct the file"),
    ],
)
def test_the_preflight_reads_the_file_without_running_it(tmp_path: Path, text: str, says: str | None) -> None:
    section = named(tmp_path, text + "\nraise SystemExit" if says is None else text)
    if says is None:
        require_algorithm(section)
        return
    with pytest.raises(ConfigError, match=says):
        require_algorithm(section)


def test_a_missing_file_is_named_with_what_to_write() -> None:
    for check in (require_algorithm, lambda section: make_algorithm(section, 100)):
        call: Any = check
        with pytest.raises(ConfigError, match=r"algorithm\.name .*no.* file 'none\.py'"):
            call(AlgorithmSection(name="python:none.py:Mine"))
