"""What may change between a checkpoint and the run that goes on from it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.resume import Contents
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.file import parse_config
from async_rl.config.reward_section import RewardSection
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.rollouts.data.prompt_table import PromptTable
from async_rl.rollouts.rewards.identity import reward_identity
from async_rl.shared.programs.user_file import file_identity
from trainer.checkpoint.compatibility import require_same_run


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": {"path": "model"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 4},
        "reward": {"name": "math"},
        "train": {"iterations": 3},
    }
    return parse_config({key: tree.get(key, {}) | sections.get(key, {}) for key in tree | sections}, source="test")


def contents(answers: list[str], reward: str = "math by math-verify 0.8", algorithm: str = "") -> Contents:
    table = PromptTable()
    for number, answer in enumerate(answers):
        table.append(number, (5, 6, 7), {"answer": answer})
    return Contents(table.digests(), reward, algorithm)


ANSWERS = [str(i) for i in range(300)]


def go_on(now: Config, now_contents: Contents | None = None, saved: Contents | None = None) -> None:
    before = saved.as_json() if saved is not None else None
    require_same_run(config().model_dump(mode="json"), now, "iteration-000002", before, now_contents)


def test_a_checkpoint_from_before_a_key_moved_goes_on() -> None:
    program: dict[str, Any] = {"program": "python:play.py:rollout", "options": {"max_turns": 7, "num_workers": 2}}
    now = config(rollout=program | {"stop": (3, "END")})
    saved = now.model_dump(mode="json")
    saved["rollout"] |= saved["rollout"].pop("options")
    saved["prompts"] |= {"template_arguments": {}}
    saved["rollout"] = {"stop_token_ids": [3]} | saved["rollout"] | {"stop": ["END"]}
    saved["pool"] |= {"dns": "instances:8000", "heartbeat_timeout_s": 3.0, "stream_interval": 4}
    require_same_run(saved, now, "iteration-000002")
    fewer = config(rollout=program | {"stop": (3, "END"), "options": {"max_turns": 6}})
    with pytest.raises(ConfigError, match=r"rollout\.options\.max_turns is 6, but was 7"):
        require_same_run(saved, fewer, "iteration-000002")
    saved["prompts"] |= {"template_arguments": {"enable_thinking": False}}
    with pytest.raises(ConfigError, match=r"prompts\.chat_template is True, but was \{.enable_thinking.: False\}"):
        require_same_run(saved, now, "iteration-000002")


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"learning_rate": 1e-5, "warmup_iterations": 4}},
        {"reward": {"name": "math", "timeout_s": 9, "max_concurrency": 2, "max_attempts": 5}},
        {"train": {"iterations": 9}},
        {"train": {"iterations": None, "epochs": 2}},
        {"trainer": {"tensor_parallel": 2}},
        {"pool": {"timeout_s": 9}},
    ],
)
def test_what_decides_nothing_may_change(changes: dict[str, Any]) -> None:
    go_on(config(**changes), contents(ANSWERS), contents(ANSWERS))


def test_settings_that_may_change_are_said_and_where_a_start_is_is_not(caplog: pytest.LogCaptureFixture) -> None:
    go_on(config(run={"dir": "run", "resume": True}, pool={"instances": ["http://a:1"]}))
    assert caplog.text == ""
    go_on(config(optimizer={"learning_rate": 1e-5}, pool={"timeout_s": 9}, evaluation={"every": 2}))
    assert "settings have changed since the checkpoint:" in caplog.text
    assert "optimizer.learning_rate is 1e-05, but was 1e-06" in caplog.text
    assert "pool.timeout_s is 9.0, but was" in caplog.text
    assert "evaluation.every is 2, but was 10" in caplog.text


def test_rows_that_changed_are_named_by_their_stretch() -> None:
    edited = [*ANSWERS[:150], "another", *ANSWERS[151:]]
    with pytest.raises(
        ConfigError, match=r"prompts have changed somewhere in rows 150 to 153|in rows 14\d to 15\d"
    ) as e:
        go_on(config(), contents(edited), contents(ANSWERS))
    assert "run.accept_changes" in str(e.value)


@pytest.mark.parametrize(("key", "setting"), [("base", r"model\.path"), ("critic_base", "critic_path")])
def test_other_weights_below_adapters_are_noticed(key: str, setting: str) -> None:
    before, now = (replace(contents(ANSWERS), **{key: digest}) for digest in ("one", "another"))
    go_on(config(), now, now)
    with pytest.raises(ConfigError, match=rf"{setting}, beside .* have the digest another, but had one"):
        go_on(config(), now, before)
    # A checkpoint of a release that did not record it.
    saved = {name: value for name, value in before.as_json().items() if name != key}
    require_same_run(config().model_dump(mode="json"), config(), "iteration-000002", saved, now)


def test_adapters_to_start_from_may_be_elsewhere_and_others_may_not_be_trained() -> None:
    def with_adapter(**adapter: Any) -> Config:
        return config().model_copy(update={"adapter": AdapterSection(rank=4, **adapter)})

    saved = with_adapter(path=Path("before")).model_dump(mode="json")
    for now in (with_adapter(), with_adapter(path=Path("moved"))):
        require_same_run(saved, now, "iteration-000002")
    with pytest.raises(ConfigError, match=r"adapter\.alpha is 8\.0, but was 32\.0"):
        require_same_run(saved, with_adapter(alpha=8.0), "iteration-000002")


def test_rows_that_were_added_or_left_out_are_noticed() -> None:
    with pytest.raises(ConfigError, match=r"rows 0 to 300 .* are used, but were 0 to 299"):
        go_on(config(), contents([*ANSWERS, "more"]), contents(ANSWERS))


def test_another_reward_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(*_): return [1.0]\n")
    named = RewardSection(name=f"python:{file}:score")
    before = reward_identity(named)
    file.write_text("def score(*_): return [0.0]\n")
    assert reward_identity(named) != before != reward_identity(RewardSection(name=f"python:{file}:other"))
    with pytest.raises(ConfigError, match=r"the reward is score in a file with sha256 .*, but was score in a file"):
        go_on(config(), contents(ANSWERS, reward_identity(named)), contents(ANSWERS, before))


PARTS = [
    {"name": "math"},
    {"name": "judge", "label": "style", "weight": 0.2, "timeout_s": 5},
]
JUDGE = {"url": "http://b", "model": "m", "rubric": "{response}"}


def with_parts(style: dict[str, Any], **section: Any) -> Config:
    """`options` in `style` are some of the judge's."""
    part = PARTS[1] | style
    if part["name"] == "judge":
        part["options"] = JUDGE | style.get("options", {})
    return config(reward={"name": None, "parts": [PARTS[0], part], **section})


@pytest.mark.parametrize(
    "style", [{}, {"timeout_s": 9, "max_attempts": 3}, {"options": {"token_from": "env:X"}}], ids=str
)
def test_how_a_part_of_the_reward_is_called_may_change(style: dict[str, Any]) -> None:
    now = with_parts(style)
    same = contents(ANSWERS, reward_identity(now.reward))
    require_same_run(with_parts({}).model_dump(mode="json"), now, "iteration-000002", same.as_json(), same)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (with_parts({"weight": 0.3}), r"reward\.parts\.style\.weight is 0\.3, but was 0\.2"),
        (with_parts({"options": {"model": "n"}}), r"reward\.parts\.style\.options\.model is 'n', but was 'm'"),
        (with_parts({"options": {"url": "http://a"}}), r"style\.options\.url is 'http://a', but was 'http://b'"),
        (with_parts({"label": "form"}), r"reward\.parts is \['math', 'form'\], but was \['math', 'style'\]"),
        (
            with_parts({"options": {"rubric": "!{response}"}}),
            r"the reward is math: .*; style: judge by .*, but was math: ",
        ),
        (
            with_parts({"name": "f1"}),
            r"the reward is math: .*; style: f1 by .*, but was ",
        ),
        (with_parts({}, column="kind"), r"reward\.column is 'kind', but was None"),
        (config(), r"reward\.parts is \[\], but was \['math', 'style'\]"),
    ],
)
def test_a_part_of_the_reward_that_changes_is_named(now: Config, message: str) -> None:
    saved = with_parts({})
    before = contents(ANSWERS, reward_identity(saved.reward)).as_json()
    mine = contents(ANSWERS, reward_identity(now.reward))
    with pytest.raises(ConfigError, match=message):
        require_same_run(saved.model_dump(mode="json"), now, "iteration-000002", before, mine)


def test_a_reward_from_before_its_threshold_was_an_option_goes_on() -> None:
    now = with_parts({})
    saved = now.model_dump(mode="json")
    saved["reward"] |= {"correct_at": 0.5, "parts": [part | {"correct_at": None} for part in saved["reward"]["parts"]]}
    require_same_run(saved, now, "iteration-000002")


def test_the_same_contents_may_lie_elsewhere() -> None:
    moved = config(prompts={"source": "/elsewhere/rows.jsonl"})
    go_on(moved, contents(ANSWERS), contents(ANSWERS))
    with pytest.raises(ConfigError, match=r"prompts\.source is '/elsewhere/rows.jsonl', but was 'rows.jsonl'"):
        go_on(moved)


def test_a_checkpoint_without_contents_is_taken_on_its_settings() -> None:
    go_on(config(), contents(ANSWERS), None)
    with pytest.raises(ConfigError, match=r"run\.seed is 4, but was 0"):
        go_on(config(run={"seed": 4}), contents(ANSWERS), None)


def test_changes_can_be_accepted_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    accepting = config(run={"accept_changes": True, "seed": 4})
    with caplog.at_level(logging.WARNING):
        go_on(accepting, contents([*ANSWERS, "more"]), contents(ANSWERS))
    assert "run.seed is 4, but was 0" in caplog.text and "rows 0 to 300" in caplog.text


EXPLICIT = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2, "normalize": "token", "scale_by_std": True}
"""What the algorithm has by default."""


def test_a_setting_left_to_the_algorithm_is_the_value_that_this_has() -> None:
    saved = config(algorithm=EXPLICIT).model_dump(mode="json")
    require_same_run(saved, config(), "iteration-000002")
    with pytest.raises(ConfigError, match=r"algorithm\.clip_high is 0\.28, but was 0\.2\n") as e:
        require_same_run(saved, config(algorithm={"name": "dapo"}), "iteration-000002")
    assert "algorithm.name is 'dapo', but was 'grpo'" in str(e.value) and "None" not in str(e.value)


def test_a_users_algorithm_may_lie_elsewhere_but_not_change(tmp_path: Path) -> None:
    file, moved = tmp_path / "mine.py", tmp_path / "moved.py"
    file.write_text("class Mine: ...\n")
    moved.write_text(file.read_text())
    names = [f"python:{path}:Mine" for path in (file, moved)]
    saved, now = (config(algorithm={"name": name}) for name in names)
    before, after = (contents(ANSWERS, algorithm=file_identity("algorithm.name", name)) for name in names)
    require_same_run(saved.model_dump(mode="json"), now, "iteration-000002", before.as_json(), after)
    moved.write_text("class Mine: x = 1\n")
    changed = contents(ANSWERS, algorithm=file_identity("algorithm.name", names[1]))
    with pytest.raises(ConfigError, match=r"the algorithm is Mine in a file with sha256 .*, but was Mine in a file"):
        require_same_run(saved.model_dump(mode="json"), now, "iteration-000002", before.as_json(), changed)
    with pytest.raises(ConfigError, match=r"algorithm\.name is 'python:.*', but was 'grpo'"):
        go_on(now, after, contents(ANSWERS))
