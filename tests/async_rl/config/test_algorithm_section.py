"""Settings of `[algorithm]` that contradict each other or the rest of a config, with their remedies."""

from typing import Any

import pytest
from pydantic import ValidationError

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.algorithm_traits import TRAITS
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.method.algorithms import ALGORITHMS, make_algorithm
from tests.support.minimal_config import config_of, minimal_tree


@pytest.mark.parametrize(
    ("algorithm", "waits"),
    [
        ({"name": "reinforce_pp_baseline"}, True),
        ({"scale_by_std": "batch"}, False),
        ({"scale_by_std": "batch", "entropy_coef": 0.1}, True),
        ({"scale_by_std": "batch", "kl_coef": 0.1}, True),
        ({"scale_by_std": "batch", "kl_coef": 0.1, "kl_in": "reward"}, False),
        ({"scale_by_std": "batch", "teacher": "t"}, True),
        ({"name": "gdpo"}, False),
        ({"name": "gdpo", "entropy_coef": 0.1}, True),
        ({"name": "gdpo", "entropy_coef": 0.1, "scale_by_std": False}, False),
        ({"entropy_coef": 0.1, "kl_coef": 0.1, "teacher": "t"}, False),
    ],
)
def test_what_cannot_stream_needs_a_synchronous_run(algorithm: dict[str, Any], waits: bool) -> None:
    assert config_of(algorithm=algorithm, train={"mode": "synchronous"}).algorithm.waits_for_batch == waits
    if not waits:
        config_of(algorithm=algorithm)
        return
    with pytest.raises(ConfigError, match=r"train\.mode is 'periodic', but .*: set train\.mode = 'synchronous'"):
        config_of(algorithm=algorithm)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"name": "gpro"}}, r"algorithm\.name is 'gpro': expected one of grpo, .*, or python:path"),
        (
            {"algorithm": {"name": "gdpo", "options": {"weights": {"shaping": 0.5, "fromat": 2.0}}}},
            r"algorithm\.options\.weights has 'fromat': expected parts of the reward, reward, or shaping",
        ),
        ({"algorithm": {"name": "distillation"}}, r"algorithm\.teacher is not set: name the teacher's checkpoint"),
        (
            {"algorithm": {"importance": "token_mask", "old_policy": "rollout"}},
            "the ratio has the instances' log-probs in it already; set one of them",
        ),
        (
            {"algorithm": {"importance": "token_mask", "old_policy": "lagged"}},
            "set old_policy to 'reuse' or 'model'",
        ),
        (
            {"algorithm": {"name": "reinforce_pp_baseline", "kl_coef": 0.1, "kl_in": "reward"}},
            "before the reference has scored the first rollout: set kl_in to 'loss'",
        ),
        (
            {"algorithm": {"overlong_tokens": 600}},
            r"algorithm\.overlong_tokens is 600, but rollout\.max_response_tokens is 512",
        ),
        (
            {"algorithm": {"name": "online_dpo"}, "trainer": {"micro_batch_tokens": 4096}},
            r"micro_batch_tokens is 4096, but .*'online_dpo' compares .* 8 x 512 .* tokens: raise",
        ),
        ({"train": {"steps_per_batch": 2}, "algorithm": {"old_policy": "rollout"}}, "set algorithm.old_policy to"),
        (
            {"algorithm": {"options": {"gamma": 0.9}}},
            r"'grpo' has the options none: correct algorithm\.options\.gamma",
        ),
        (
            {"algorithm": {"name": "ppo", "options": {"critic_iterations_alone": 7}}, "train": {"iterations": 7}},
            r"critic_iterations_alone is 7, but train\.iterations is 7: the policy would never learn; lower the one",
        ),
        (
            {"algorithm": {"name": "ppo"}, "prompts": {"reserve": 3}},
            r"prompts\.reserve is 3 with .*'ppo': .* learns from such prompts, too; set prompts\.reserve = 0",
        ),
        ({"algorithm": {"name": "ppo", "options": {"gamma": 1.1}}}, r"options\.gamma.* less than or equal to 1"),
        *(
            ({"rollout": {key: 0.9}}, rf"rollout\.{key} \(value 0\.9\) is no setting: the trainer's log-probs are of")
            for key in ("top_p", "top_k", "min_p")
        ),
    ],
)
def test_a_contradiction_is_named_with_its_remedy(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(**sections)


def test_weights_name_parts_of_the_reward_or_what_a_program_gives() -> None:
    def config(reward: dict[str, Any], program: str, *names: str) -> Config:
        weights = dict.fromkeys(names, 2.0)
        tree = minimal_tree() | {"reward": reward, "rollout": {"program": program}}
        return parse_config(tree | {"algorithm": {"name": "gdpo", "options": {"weights": weights}}}, "here")

    parts = {"parts": [{"name": "math"}, {"name": "exact", "label": "format"}]}
    config(parts, "single_turn", "math", "format", "shaping")
    config(parts, "python:mine.py:play", "math", "reward")
    with pytest.raises(ConfigError, match=r"weights has 'reward': expected parts of the reward, math, format, or sh"):
        config(parts, "single_turn", "math", "reward")


def test_one_rollout_per_prompt_is_enough_for_algorithms_that_do_not_compare() -> None:
    rollout = {"responses_per_prompt": 1}
    for algorithm in (
        {"name": "distillation", "teacher": "t"},
        {"name": "ppo"},
        {"name": "python:mine.py:Mine"},
    ):
        assert config_of(algorithm=algorithm, rollout=rollout).rollout.responses_per_prompt == 1
    for name in (name for name, traits in TRAITS.items() if not traits.single_rollouts):
        with pytest.raises(ConfigError):
            config_of(algorithm={"name": name}, rollout=rollout, train={"mode": "synchronous"})


UNUSED = [(name, key) for name, made in ALGORITHMS.items() for key in made.UNUSED]
VALUES: dict[str, Any] = {
    **dict.fromkeys(("clip_low", "clip_high", "kl_coef", "entropy_coef"), 0.1),
    "teacher_coef": 0.1,
    "teacher": "t",
    "importance": "token_mask",
    "importance_high": 3.0,
    "kl_estimator": "k1",
    "normalize": "sequence",
    "scale_by_std": False,
    "overlong_tokens": 4,
    "kl_in": "reward",
}


@pytest.mark.parametrize(("name", "key"), UNUSED)
def test_a_setting_without_effect_is_refused(name: str, key: str) -> None:
    teacher = {"teacher": "t"} if name == "distillation" or key == "teacher" else {}
    with pytest.raises(ValidationError, match=rf"'{name}' does not use algorithm\.{key}: remove them"):
        AlgorithmSection.model_validate({"name": name, **teacher, **({} if key == "teacher" else {key: VALUES[key]})})


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("options", [{}, {"no_such": 1}, {"delta": 2.0}, {"beta": "x"}, {"weights": {"a": "b"}}])
def test_options_are_those_of_the_algorithm(name: str, options: dict[str, Any]) -> None:
    section = {"name": name, "options": options} | ({"teacher": "t"} if name == "distillation" else {})
    if not options:
        made: Any = make_algorithm(AlgorithmSection.model_validate(section), 100)
        assert type(made.options) is TRAITS[name].options
        return
    with pytest.raises(ValidationError, match=rf"algorithm\.name = '{name}' has the options .*: correct algorithm"):
        AlgorithmSection.model_validate(section)


def test_a_critic_has_options_with_ppo_or_an_algorithm_of_ones_own() -> None:
    options = {"gae_lambda": 0.9}
    for name, more in (("ppo", {}), ("python:mine.py:Mine", {"mine": 1})):
        assert config_of(algorithm={"name": name, "options": options | more}).algorithm.critic.gae_lambda == 0.9


def test_what_older_configs_set_means_what_it_meant() -> None:
    older = {"clip_low": 0.2, "clip_high": 0.2, "normalize": "token", "scale_by_std": True}
    for changes in ({}, {"scale_by_std": False}, {"normalize": "sequence", "clip_low": 0.1}):
        made: Any = make_algorithm(config_of(algorithm={"name": "grpo", **older, **changes}).algorithm, 512)
        by_default: Any = make_algorithm(config_of(algorithm=changes).algorithm, 512)
        for key in older:
            assert getattr(made, key) == getattr(by_default, key) == (older | changes)[key]
