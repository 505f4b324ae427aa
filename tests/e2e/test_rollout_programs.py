"""A run whose rollouts are those of a program with several turns, tools and branches, on real parts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.local_run import Run
from tests.support.tiny_model import make_tiny_model

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


@pytest.fixture
def run(new_run: Callable[[str], Run], tmp_path: Path) -> Run:
    run = new_run("run")
    model = make_chat_model(tmp_path / "chat")
    (tmp_path / "program.py").write_text(PROGRAM)
    before = run.config.read_text()
    lines = [line for line in before.splitlines() if not line.startswith(("path =", "chat_template"))]
    text = "\n".join(lines).replace("[model]", f'[model]\npath = "{model}"')
    text = text.replace("max_response_tokens = 24", "max_response_tokens = 64").replace(
        "[reward]", f'program = "python:{tmp_path / "program.py"}:rollout"\nrenderer = "qwen3"\n[reward]'
    )
    run.config.write_text(text)
    return run


def make_chat_model(path: Path) -> Path:
    make_tiny_model(path, "qwen3", tied=True, vocab_size=128, max_position_embeddings=1024)
    make_chat_tokenizer(path)
    return path


def test_a_run_of_programs_is_proven_token_by_token(run: Run) -> None:
    run.start("--inference.num_instances=2", "--train.iterations=2")
    assert run.finish() == 0, run.everything_said()
    proofs = run.lines("ledger.jsonl")
    assert len(proofs) == 2 and all(proof["on_policy"] for proof in proofs)
    records = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert all(record["max_logprob_gap"] < 1e-4 for record in records)
    rollouts = run.lines("rollouts.jsonl")
    assert [(each["iteration"], each["num_rollouts"]) for each in rollouts] == [(0, 24), (1, 24)]
    assert all(each["turns_max"] == 4 and each["branches_mean"] for each in rollouts)
