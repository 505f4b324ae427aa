"""What `train` makes of its arguments, before anything is written."""

import math
import tomllib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import pytest

import async_rl
from async_rl.api.inputs import Inputs
from async_rl.api.settings import Sections, parsed, toml_of, tree_of
from async_rl.config.file import parse_config
from async_rl.config.keys import keys_of
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support.minimal_config import minimal_tree

ROWS = [{"prompt": "a", "answer": "b"}]

SETTINGS: dict[str, Any] = {"prompts": {"prompts_per_batch": 2}, "train": {"iterations": 3}}


def of(path: Path, reward: Any = "exact", data: Any = ROWS, **given: Any) -> Config:
    """The config of a run in this folder."""
    out = given.pop("out", path / "run")
    program = given.pop("program", None)
    tree = tree_of(None, SETTINGS | given, model="some/model", data=data, reward=reward, program=program, out=out)
    return parsed(Inputs(path / "inputs").take(tree), "async_rl.train")


def test_sections_are_named_for_editors() -> None:
    assert {*Sections.__annotations__} == Config.model_fields.keys() - {"model", "reward"}


def test_arguments_and_sections_are_one_config(tmp_path: Path) -> None:
    config = of(tmp_path, rollout={"responses_per_prompt": 4}, run={"seed": 7})
    assert (config.model.path, config.reward.name, config.run.seed) == ("some/model", "exact", 7)
    assert (config.rollout.responses_per_prompt, config.train.iterations) == (4, 3)
    assert config.prompts.source == str(tmp_path / "inputs" / "data.jsonl") and not (tmp_path / "inputs").exists()


def test_several_rewards_are_added_up_and_labelled_by_their_functions(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")

    def brief(prompt: Any, responses: Any, row: Any) -> list[float]:
        return [0.0]

    config = of(tmp_path, ["exact", brief])
    assert list(config.reward.weights) == ["exact", "brief"]
    assert config.reward.parts[1].name == f"python:{tmp_path}/inputs/reward.py:reward"


def test_a_config_validates_and_prints_what_was_given() -> None:
    config = async_rl.Config(**minimal_tree())
    assert config.train.iterations == 3
    assert tomllib.loads(config.toml()) == minimal_tree()
    with pytest.raises(ConfigError, match=r"unknown key 'train.iteratoins'.*did you mean 'train.iterations'"):
        async_rl.Config(**minimal_tree() | {"train": {"iteratoins": 3}})  # type: ignore[arg-type]


def test_arguments_replace_the_values_of_a_config(tmp_path: Path) -> None:
    given = async_rl.Config(**minimal_tree())
    tree = tree_of(given, {"train": {"iterations": 9}}, data="other.jsonl")
    config = parse_config(tree, "here")
    assert (config.train.iterations, config.prompts.source, config.prompts.prompts_per_batch) == (9, "other.jsonl", 4)
    assert tomllib.loads(toml_of(config))["run"] == {"dir": "runs/x"}
    assert given.train.iterations == 3


def test_files_that_are_here_are_named_by_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "score.py"):
        Path(name).touch()
    config = of(tmp_path, "python:score.py:score", "rows.jsonl")
    assert config.prompts.source == str(tmp_path / "rows.jsonl")
    assert config.reward.name == f"python:{tmp_path}/score.py:score"
    assert of(tmp_path, data="hf:openai/gsm8k").prompts.source == "hf:openai/gsm8k"


def three(prompt: Any, responses: Any) -> list[float]:
    return []


async def program(prompt: Any, policy: Any) -> float:
    return 0.0


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown argument": ({"iteratons": 5}, "unknown argument 'iteratons': did you mean 'train.iterations'"),
    "unknown section": ({"optimiser": {}}, r"unknown argument 'optimiser': did you mean \[optimizer\]"),
    "unknown key": ({"train": {"iteratons": 5}}, "unknown key 'train.iteratons'.*'train.iterations'"),
    "no table": ({"train": 5}, r"train is 5: expected the keys of \[train\]"),
    "no reward": ({"reward": 5}, "reward.name is 5: expected a function, the name of a built-in"),
    "two parameters": ({"reward": three}, r"reward.name three: it takes \(prompt: .*, but a reward is called with"),
    "unknown reward parts": ({"reward": {"parts": [{"name": 3}]}}, "reward.parts.0.name is 3"),
    "synchronous program": ({"program": three}, "rollout.program is three: expected an asynchronous function"),
    "no class": ({"algorithm": {"name": three}}, "algorithm.name is three: expected a class"),
    "no node": (
        {"pipeline": {"nodes": [{"name": "n", "function": 3, "reads": ["rewards"]}]}},
        "pipeline.nodes.0.function is 3: expected a function",
    ),
    "no rows": ({"data": []}, "prompts.source has no rows"),
    "a number": ({"data": 5}, r"prompts.source is 5 \(int\): give a path, a list of rows"),
    "a generator": ({"data": (row for row in ROWS)}, r"is a generator, which has no length: give list\(...\) of it"),
    "an array of no dimension": ({"data": numpy.array(1)}, "is a ndarray, which has no length"),
    "splits": ({"data": {"train": ROWS}}, r"is a mapping with 'train': give one split of it"),
    "no data": ({"data": None}, "data is missing"),
    "no folder": ({"out": None}, "out is missing: name the folder of the run"),
}


AWKWARD: list[Any] = [
    None,
    True,
    -1,
    0.5,
    2**70,
    math.inf,
    "",
    "\ud800",
    "a\n'\"\\\x7f\u2028",
    [1],
    [None],
    {},
    {1: 2},
    {"a b": math.inf},
]
AWKWARD += [(1, 2), {1, 2}, b"x", Path("x"), date(2020, 1, 1), numpy.int64(3), numpy.float32(0.5), numpy.array([1, 2])]


@pytest.mark.parametrize("value", AWKWARD, ids=ascii)
def test_any_value_of_any_key_is_refused_by_name_or_a_file_that_says_the_same(value: Any) -> None:
    for name in keys_of(async_rl.Config):
        section, _, key = name.partition(".")
        given = minimal_tree()
        given.setdefault(section, {})[key] = value
        try:
            config = async_rl.Config(**given)
        except ConfigError:
            continue
        text = config.toml().encode().decode()
        assert parse_config(tomllib.loads(text), "again").model_dump() == config.model_dump(), name


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_is_written(tmp_path: Path, mistake: str) -> None:
    given, said = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        of(tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_a_program_and_an_algorithm_are_sent(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    config = of(tmp_path, None, program=program)
    assert config.rollout.program == f"python:{tmp_path}/inputs/rollout.py:rollout"


def test_nodes_of_the_pipeline_are_sent(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    nodes = [{"name": name, "function": three, "reads": ["prompt", "responses"]} for name in ("a", "b")]
    config = of(tmp_path, pipeline={"nodes": nodes})
    files = [node.function for node in config.pipeline.nodes]
    assert files == [f"python:{tmp_path}/inputs/{name}.py:{name}" for name in ("pipeline", "pipeline_1")]


def test_rows_of_evaluation_sets_and_mixtures_are_files(tmp_path: Path) -> None:
    sets = [{"name": "test", "source": ROWS}]
    config = of(tmp_path, evaluation={"sets": sets})
    assert config.evaluation.sets[0].source == f"{tmp_path}/inputs/evaluation_sets_0.jsonl"
    assert sets == [{"name": "test", "source": ROWS}], "the user's own list is as it was"


def test_nothing_of_a_run_is_kept_between_two(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"iterations": 3}
    make: Callable[[str], Config] = lambda name: of(tmp_path, out=tmp_path / name, train=shared)  # noqa: E731
    assert (make("a").run.dir.name, make("b").run.dir.name, shared) == ("a", "b", {"iterations": 3})
