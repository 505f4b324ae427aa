"""What is found by rendering rows and calling a reward: what no run could train, named before one starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.checks.preflight.trial import MADE_UP, Trial, try_out
from async_rl.checks.preflight.user_file import require_nodes
from async_rl.config.pipeline_section import PipelineNode, PipelineSection
from async_rl.config.sections import Config
from async_rl.errors import ConfigError

pytestmark = pytest.mark.distributed

ROW = {"prompt": "a", "answer": "b"}
LONG = {"prompt": "a " * 100, "answer": "b"}
SCORE = "def score(prompt, responses, row):\n    return [0.0 for _ in responses]\n"


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_model("qwen3", tied=True), tmp_path / "model")
    (tmp_path / "reward.py").write_text(SCORE)
    (tmp_path / "long.jsonl").write_text(lines(LONG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def config(*, rows: str = lines(*[ROW] * 6), **sections: dict[str, object]) -> Config:
    """A config in the working directory; `sections` add to those that it has."""
    Path("rows.jsonl").write_text(rows)
    tree: dict[str, dict[str, object]] = {
        "run": {"dir": "run"},
        "model": {"path": "model"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 4, "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 24},
        "reward": {"name": "python:reward.py:score"},
        "train": {"iterations": 3},
    }
    names = tree.keys() | sections.keys()
    return Config.model_validate({name: tree.get(name, {}) | sections.get(name, {}) for name in names})


BROKEN_REWARDS = {
    "texts": ("return [r.text for r in responses]", "it returned '' among its values, expected 8 finite floats"),
    "none": ("return None", "it returned None, expected 8 finite floats"),
    "nothing for one": ("return [None if r.text else 0.0 for r in responses]", "it returned None among its values"),
    "not a number": ("return [float('nan') for r in responses]", "it returned nan among its values"),
    "too few": ("return [0.0]", "it returned 1 values, expected 8"),
    "one for all": ("return 1.0", "it returned 1.0, expected 8"),
    "raises": ("return [r.text[0] == 'x' for r in responses]", "IndexError: string index out of range"),
    "another column": ("return [row['solution'] for _ in responses]", "KeyError: 'solution'"),
    "ends": ("raise SystemExit(3)", "SystemExit: 3"),
    "hangs": ("import time; time.sleep(60)", "no answer within reward.timeout_s = 1 s"),
}


@pytest.mark.parametrize("name", BROKEN_REWARDS)
def test_a_reward_that_cannot_score_is_named_with_its_lines(name: str, workplace: Path) -> None:
    body, words = BROKEN_REWARDS[name]
    (workplace / "reward.py").write_text(f"def score(prompt, responses, row):\n    {body}\n")
    (said,) = try_out(config(reward={"timeout_s": 1.0 if name == "hangs" else 30.0})).errors
    assert said.startswith("tried with made-up responses to row 0 (from 0), reward 'python:reward.py:score'")
    assert words in said and "correct the reward" in said
    frames = [line for line in said.splitlines() if line.startswith("  File ")]
    assert all("reward.py" in frame for frame in frames), said


def test_a_call_gets_as_many_responses_as_a_group_has_and_a_file_that_does_not_load_is_named(workplace: Path) -> None:
    code = "def score(prompt, responses, row):\n    raise KeyError(repr([r.text for r in responses]))\n"
    (workplace / "reward.py").write_text(code)
    (said,) = try_out(config(rollout={"responses_per_prompt": 5})).errors
    assert repr([*MADE_UP, MADE_UP[0]]) in said.replace("\\\\\\\\", "\\\\")
    (workplace / "reward.py").write_text(SCORE + "1 / 0\n")
    (said,) = try_out(config()).errors
    assert "cannot be loaded" in said and "ZeroDivisionError" in said


def test_a_reward_that_takes_long_is_a_warning(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.checks.preflight.trial.CALL_S", 0.5)
    (workplace / "reward.py").write_text("import time\ndef score(prompt, responses, row):\n    time.sleep(60)\n")
    trial = try_out(config())
    assert not trial.errors and "no answer within reward.timeout_s = 0.5 s" in trial.warnings[0]


def test_only_parts_that_score_the_row_are_called_and_no_service_is(workplace: Path) -> None:
    (workplace / "reward.py").write_text(SCORE + "def broken(prompt, responses, row):\n    return None\n")
    parts = [
        {"name": "python:reward.py:score", "label": "mine"},
        {"name": "python:reward.py:broken", "label": "other"},
        {"name": "http", "options": {"url": "http://127.0.0.1:9"}},
    ]
    reward: dict[str, object] = {"name": None, "parts": parts, "column": "kind"}
    rows = [lines(*[{**ROW, "kind": kind}] * 6) for kind in (["mine", "http"], ["mine", "other"])]
    assert not try_out(config(rows=rows[0], reward=reward)).errors
    (said,) = try_out(config(rows=rows[1], reward=reward)).errors
    assert "reward 'other', prompt 0" in said


DATA: dict[str, tuple[str, dict[str, dict[str, object]], str]] = {
    "no such column of answers": (
        *(lines(*[ROW] * 6), {"prompts": {"columns": {"prompt": "prompt", "answer": "solution"}}}),
        "6 of 6 prompts have no answer",
    ),
    "no answers": (lines(*[{"prompt": "a"}] * 6), {"reward": {"name": "multiple_choice"}}, "'answer'"),
    "no such column": (
        *(lines(*[ROW] * 6), {"prompts": {"columns": {"prompt": "prompt", "stop": "end"}}}),
        "no row has a value for ['stop'] of its columns",
    ),
    "all too long": (
        *(lines(*[LONG] * 6), {}),
        "6 of 6 prompts have more than prompts.max_prompt_tokens = 64 tokens (longest:",
    ),
    "too few that fit": (
        *(lines(*[ROW] * 3, *[LONG] * 3), {}),
        "3 prompts are left for prompts.prompts_per_batch = 4",
    ),
    "an evaluation set that is too long": (
        *(lines(*[ROW] * 6), {"evaluation": {"sets": [{"name": "long", "source": "long.jsonl"}]}}),
        "evaluation set 'long': 1 of 1 prompts have more than",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_rows_that_no_run_could_train_are_named(name: str, workplace: Path) -> None:
    rows, sections, message = DATA[name]
    assert message in "\n".join(try_out(config(rows=rows, **sections)).errors)


def test_a_template_that_does_not_take_a_row_is_named(workplace: Path) -> None:
    (workplace / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    (said,) = try_out(config()).errors
    assert "row 0: the tokenizer's chat template does not render its prompt: TypeError" in said


def test_of_many_rows_the_first_and_a_sample_are_measured(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("ALL_MEASURED", 10), ("MEASURED_EVERY", 5), ("LAST_MEASURED", 40)):
        monkeypatch.setattr(f"async_rl.rollouts.data.table_files.{limit}", value)
    long = {3, 11, 15, 39, 45}
    trial = try_out(config(rows=lines(*(LONG if number in long else ROW for number in range(60)))))
    assert not trial.errors
    (said,) = trial.warnings
    assert "2 of 16 prompts have more than" in said and said.endswith("rows 3, 15; they are left out")


@pytest.mark.parametrize(
    ("num_rows", "prompts", "said"),
    [
        (6, {}, "train.epochs = 2 of 6 prompts, 4 a batch: 3 iterations"),
        (9, {"held_out": 2, "reserve": 1}, "train.epochs = 2 of 7 prompts, 5 a batch: 3 iterations"),
        (9, {"held_out": 0.1, "deduplicate": True}, "train.epochs = 2 of about 8 prompts, 4 a batch: 4 iterations"),
        (12, {}, "train.epochs = 2: the start reads all rows, and makes a number of iterations of it"),
    ],
)
def test_epochs_are_counted_where_the_rows_are_known(
    num_rows: int, prompts: dict[str, object], said: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.rollouts.data.table_files.ALL_MEASURED", 10)
    train: dict[str, object] = {"iterations": None, "epochs": 2}
    trial = try_out(config(rows=lines(*[ROW] * num_rows), prompts=prompts, train=train))
    assert (trial.errors, trial.notes) == ([], [said])


def test_epochs_in_which_the_critic_is_always_alone_are_an_error(workplace: Path) -> None:
    sections: dict[str, dict[str, object]] = {"algorithm": {"name": "ppo", "options": {"critic_iterations_alone": 3}}}
    (said,) = try_out(config(train={"iterations": None, "epochs": 2}, **sections)).errors
    assert "the policy would never learn" in said


NODES = """
import time

def mean(responses): return [sum(r.logprobs) / r.num_sampled for r in responses]
def parts(rewards, reward_parts): return [min(rewards) + sum(map(len, reward_parts.values())) for _ in rewards]
def short(rewards): return rewards[1:]
def hangs(rewards): time.sleep(60)
def other(reward): return reward
"""


def tried(name: str, *reads: str, timeout_s: float = 1.0, **sections: dict[str, object]) -> Trial:
    Path("nodes.py").write_text(NODES)
    node = {"name": "n", "function": f"python:nodes.py:{name}", "reads": reads, "timeout_s": timeout_s}
    return try_out(config(pipeline={"nodes": [node]}, **sections))


@pytest.mark.parametrize("size", [2, 8])
def test_nodes_are_called_as_in_a_run(size: int, workplace: Path) -> None:
    group = {"responses_per_prompt": size, "max_response_tokens": 24}
    of_parts = {"name": None, "parts": [{"name": "python:reward.py:score", "label": "a"}]}
    for trial in (
        tried("mean", "responses", rollout=group),
        tried("parts", "rewards", "reward_parts", rollout=group, reward=of_parts),
    ):
        assert not trial.errors and not trial.warnings
    assert f"expected {size} finite floats" in tried("short", "rewards", rollout=group).errors[0]


def test_a_node_that_takes_longer_than_it_may_or_takes_another_argument_is_refused(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no answer within pipeline.nodes 'n'.timeout_s = 1 s" in tried("hangs", "rewards").errors[0]
    monkeypatch.setattr("async_rl.checks.preflight.trial.CALL_S", 1.0)
    trial = tried("hangs", "rewards", timeout_s=60.0)
    assert not trial.errors and "no answer within pipeline.nodes 'n'.timeout_s = 1 s" in trial.warnings[0]
    assert "is called with what the node reads, rewards" in tried("other", "rewards").errors[0]
    for name, said in (("other", r"line 8: it is called with what .* rewards: "), ("none", "has no function 'none'")):
        node = PipelineNode(name="n", function=f"python:nodes.py:{name}", reads=("rewards",))
        with pytest.raises(ConfigError, match=said):
            require_nodes(PipelineSection(nodes=(node,)))
