"""Runs whose rollouts are those of a program with several turns, tools and branches, on real parts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chat_tokenizer import make_chat_model
from tests.support.local_run import Run

pytestmark = pytest.mark.distributed

PROGRAM = '''
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def rollout(prompt, policy):
    """One to three turns with a tool's answers between them; half of the rollouts then change their first message."""
    messages = list(prompt.messages)
    num_vowels = 0
    for number in range(1 + prompt.seed % 3):
        turn = await policy.generate(messages, tools=TOOLS, max_tokens=12)
        num_vowels += sum(letter in "aeiou" for letter in turn.text)
        messages += [turn.message, {"role": "tool", "content": f"result {number}", "tool_call_id": f"call {number}"}]
    if prompt.seed % 2:
        await policy.generate([{"role": "user", "content": "another question"}, *messages[1:]], max_tokens=8)
    return num_vowels / 10
'''

EVALUATION = """
[evaluation]
every = 1
max_delay_s = 30.0
[[evaluation.sets]]
name = "held-out"
source = "{source}"
num_samples = 2
max_prompts = 3
temperature = 0.7
"""

SETTINGS = (
    *("--inference.num_instances=2", "--train.iterations=2", "--train.order=prompt"),
    # So small a step changes no sample: those of both layouts can be compared in each iteration.
    "--optimizer.learning_rate=1e-9",
)


@pytest.fixture
def make_run(new_run: Callable[[str], Run], tmp_path: Path) -> Callable[[str], Run]:
    model = make_chat_model(tmp_path / "chat")
    (tmp_path / "program.py").write_text(PROGRAM)

    def make(name: str) -> Run:
        run = new_run(name)
        before = run.config.read_text()
        lines = [line for line in before.splitlines() if not line.startswith(("path =", "chat_template", "name ="))]
        text = "\n".join(lines).replace("[model]", f'[model]\npath = "{model}"')
        text = text.replace("max_response_tokens = 24", "max_response_tokens = 64").replace(
            "[reward]", f'program = "python:{tmp_path / "program.py"}:rollout"\nrenderer = "qwen3"\n[reward]'
        )
        run.config.write_text(text + EVALUATION.format(source=tmp_path / name / "rows.jsonl"))
        return run

    return make


def test_programs_are_proven_and_evaluated_and_the_same_with_two_leaders(make_run: Callable[[str], Run]) -> None:
    run, divided = make_run("run"), make_run("divided")
    run.start(*SETTINGS)
    assert run.finish() == 0, run.everything_said()
    divided.start(*SETTINGS, "--trainer.num_processes=2")
    assert divided.finish() == 0, divided.everything_said()
    for each in (run, divided):
        assert [proof["on_policy"] for proof in each.lines("ledger.jsonl")] == [True, True], each.everything_said()
        assert all(record["max_logprob_gap"] < 1e-4 for record in each.lines("metrics.jsonl"))
    proofs = ("samples", "prompt_ids", "num_responses", "num_response_tokens", "num_turns", "num_branches")
    groups = ("iteration", "index", "prompt_id", "samples", "reward_mean", "num_turns", "num_branches")
    for name, keys in (("ledger.jsonl", proofs), ("timeline.jsonl", groups)):
        rows, expected = ([[row[key] for key in keys] for row in each.lines(name)] for each in (divided, run))
        assert rows == expected and rows, name
    rollouts = run.lines("rollouts.jsonl")
    assert [(each["iteration"], each["num_rollouts"]) for each in rollouts] == [(0, 24), (1, 24)]
    assert all(each["turns_max"] == 4 and each["branches_mean"] for each in rollouts)
    assert [each["num_rollouts"] for each in divided.lines("rollouts.jsonl")] == [12, 12], "of the main rank's replica"
    # An evaluation that the training outran has no figures; those of all others are of the same samples.
    evaluations = [row for each in (run, divided) for row in each.lines("evaluations.jsonl") if row["complete"]]
    figures = ("num_prompts", "num_samples", "reward_mean", "response_tokens_mean", "truncated_share")
    assert len({tuple(row[key] for key in figures) for row in evaluations}) == 1, evaluations
