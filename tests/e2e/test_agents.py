"""A run whose rollouts are those of a black-box agent, a process each, on real parts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.local_run import Run
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.distributed

# Without packages: two dozen of them start in each iteration.
AGENT = """
import json
import os
import sys
import urllib.request

messages, num_vowels = json.load(sys.stdin)["messages"], 0
for number in range(2):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 12}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.loads(answer.read())["choices"][0]["message"]
    num_vowels += sum(letter in "aeiou" for letter in said["content"])
    messages += [said, {"role": "user", "content": f"and {number}?"}]
print(json.dumps({"reward": num_vowels / 10}))
"""


def test_a_run_of_agents_is_proven_token_by_token(new_run: Callable[[str], Run], tmp_path: Path) -> None:
    run = new_run("run")
    model = make_tiny_model(tmp_path / "chat", "qwen3", tied=True, vocab_size=128, max_position_embeddings=1024)
    make_chat_tokenizer(model)
    (tmp_path / "agent.py").write_text(AGENT)
    before = run.config.read_text()
    lines = [line for line in before.splitlines() if not line.startswith(("path =", "chat_template"))]
    text = "\n".join(lines).replace("[model]", f'[model]\npath = "{model}"')
    text = text.replace("max_response_tokens = 24", "max_response_tokens = 64").replace(
        "[reward]",
        f'program = "command:{sys.executable} {tmp_path / "agent.py"}"\n'
        '[rollout.options]\nrenderer = "qwen3"\n[reward]',
    )
    run.config.write_text(text)
    run.train("--inference.num_instances=1", "--train.iterations=2")
    proofs = run.lines("ledger.jsonl")
    assert len(proofs) == 2 and all(proof["on_policy"] for proof in proofs)
    assert all(record["max_logprob_gap"] < 1e-4 for record in run.lines("metrics.jsonl"))
    rollouts = run.lines("rollouts.jsonl")
    assert [(each["num_rollouts"], each["turns_max"], each["branches_mean"]) for each in rollouts] == [(24, 2, 0)] * 2
