"""The examples' rollout programs, with a policy that says what is written here: their tools are real."""

import asyncio
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT

EXAMPLES = ROOT / "examples"


class Scripted:
    """A policy whose turns are written down; it keeps what it was shown."""

    def __init__(self, *turns: str | dict[str, Any]) -> None:
        self._turns = list(turns)
        self.shown: list[list[dict[str, Any]]] = []

    async def generate(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]]) -> Any:
        self.shown.append(list(messages))
        said = self._turns.pop(0)
        text = said if isinstance(said, str) else ""
        calls = [] if isinstance(said, str) else [{"id": f"call {len(self._turns)}", "function": said}]
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        return SimpleNamespace(text=text, tool_calls=calls, message=message)


def play(file: str, row: int, *turns: str | dict[str, Any]) -> tuple[float, list[str]]:
    """The reward of a rollout of this program, and what its tools answered."""
    path = EXAMPLES / file
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = json.loads((path.parent / "rows.jsonl").read_text().splitlines()[row])
    policy = Scripted(*turns)
    reward = asyncio.run(module.rollout(SimpleNamespace(messages=data["messages"], row=data), policy))
    return reward, [message["content"] for message in policy.shown[-1] if message["role"] == "tool"]


def run(code: str) -> dict[str, Any]:
    return {"name": "python", "arguments": json.dumps({"code": code})}


@pytest.mark.distributed
def test_python_keeps_its_state_over_the_turns_and_survives_nonsense() -> None:
    primes = run("primes = [p for p in range(2, 60) if all(p % d for d in range(2, p))]")
    broken: list[dict[str, Any]] = [{"name": "python", "arguments": text} for text in ("{", "[]", "{}")]
    reward, said = play("sandbox/program.py", 0, primes, *broken, run("1 / 0"), run("sum(primes)"), "It is 440.")
    assert reward == 1.0
    assert said[0] == "" and all(text.startswith("error: ") for text in said[1:4])
    assert "ZeroDivisionError" in said[4] and said[5].strip() == "440"
    assert play("sandbox/program.py", 0, "It is 441.") == (0.0, [])


def test_multiply_answers_numbers_and_explains_nonsense() -> None:
    product = {"name": "multiply", "arguments": '{"a": 37, "b": 41}'}
    reward, said = play("tools/environment.py", 0, {"name": "multiply", "arguments": '{"a": 1}'}, product, "1517")
    assert reward == 1.0 and said[0].startswith("error: ") and said[1] == "1517"
