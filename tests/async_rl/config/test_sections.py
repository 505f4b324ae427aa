import json
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.file import load_config
from async_rl.config.prompts_section import MixturePart
from async_rl.config.section import Section
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support import ROOT
from tests.support.minimal_config import MINIMAL


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_config_loads_with_defaults(config_file: Path) -> None:
    config = load_config(config_file)
    assert config.train.mode == "periodic"
    assert config.algorithm.name == "grpo"
    assert config.prompts.prompts_per_batch == 4


def test_a_reward_may_be_left_out_only_where_a_program_gives_it(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace('[reward]\nname = "math"\n', ""))
    with pytest.raises(
        ConfigError, match=r"reward\.name is not set, but rollout\.program = 'single_turn' needs a reward"
    ):
        load_config(config_file)
    config_file.write_text(config_file.read_text() + '[[evaluation.sets]]\nname = "a"\nsource = "b.jsonl"\n')
    assert load_config(config_file, ["--rollout.program=python:x.py:rollout"]).reward.name is None


def test_a_batch_smaller_than_the_replicas_is_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="every replica needs at least one prompt"):
        load_config(config_file, ["--trainer.num_processes=5"])


def test_ranks_that_form_no_replicas_are_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 training ranks .* 2 x 1 = 2 ranks: start a multiple"):
        load_config(config_file, ["--trainer.num_processes=3", "--trainer.tensor_parallel=2"])
    with pytest.raises(ConfigError, match=r"expert_parallel = 2 does not divide the 1 ranks of a pipeline stage"):
        load_config(config_file, ["--trainer.expert_parallel=2"])
    assert load_config(config_file, ["--trainer.pipeline_parallel=2"]).trainer.num_local_ranks == 2


def test_several_steps_per_batch_need_an_old_model(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps_per_batch is 2 with algorithm\.old_policy = 'lagged'"):
        load_config(config_file, ["--train.steps_per_batch=2", "--algorithm.old_policy=lagged"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["--train.steps_per_batch=2", "--algorithm.old_policy=model"],
            "2 with train.steps_per_batch = 2: prompts are",
        ),
        (["--rollout.responses_per_prompt=1"], "reserve is 2 with rollout.responses_per_prompt = 1"),
        (["--algorithm.name=distillation", "--algorithm.teacher=there"], "'distillation': it avoids prompts"),
        (["--prompts.reserve=-1"], "greater than or equal to 0"),
    ],
)
def test_a_reserve_that_cannot_be_selected_from_is_refused(
    config_file: Path, settings: list[str], message: str
) -> None:
    assert load_config(config_file, ["--prompts.reserve=2"]).prompts.num_drawn == 6
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, ["--prompts.reserve=2", *settings])


def test_a_group_of_one_response_is_refused_since_it_trains_nothing(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"responses_per_prompt is 1, but .*'grpo' compares.*nothing is learned"):
        load_config(config_file, ["--rollout.responses_per_prompt=1"])


@pytest.mark.parametrize("setting", [{"top_p": 0.0}, {"top_p": 1.01}, {"top_p": "nan"}, {"top_k": -1}], ids=str)
def test_truncated_sampling_of_an_evaluation_set_has_bounds(config_file: Path, setting: dict[str, object]) -> None:
    ((key, value),) = setting.items()
    config_file.write_text(
        config_file.read_text() + f'[[evaluation.sets]]\nname = "a"\nsource = "b.jsonl"\n{key} = {value}\n'
    )
    with pytest.raises(ConfigError, match=rf"evaluation\.sets\.0\.{key}: Input should be"):
        load_config(config_file)


GUIDE = ROOT / "docs" / "configuration.md"


def row(name: str, setting: FieldInfo) -> str:
    """A key's row of the guide."""
    default = setting.get_default(call_default_factory=True)
    shown = "required" if setting.is_required() else f"`{json.dumps(default)}`"
    return f"| `{name}` | {shown} | {setting.description} |"


def test_the_configuration_guide_names_every_key_with_its_default_and_meaning() -> None:
    guide = GUIDE.read_text()
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for key, setting in field.annotation.model_fields.items():
            assert row(f"{section}.{key}", setting) in guide


@pytest.mark.parametrize(("table", "model"), [("evaluation.sets", EvaluationSet), ("prompts.mixture", MixturePart)])
def test_the_configuration_guide_names_every_key_of_a_table_in_a_list(table: str, model: type[Section]) -> None:
    part = GUIDE.read_text().split(f"## [[{table}]]")[1].split("\n## ")[0]
    for key, setting in model.model_fields.items():
        assert row(key, setting) in part
