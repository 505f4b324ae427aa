"""A rollout program with several turns, tools and branches, for local runs."""

from pathlib import Path

from tests.support.local_run import Run

PROGRAM = '''
import asyncio
import random

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def rollout(prompt, policy):
    """One to three turns with a tool's answers between them; half of the rollouts then change their first message.

    The rollouts of every third prompt have the same reward, those of all others have different ones; no two runs have
    the same order of them.
    """
    messages = list(prompt.messages)
    num_vowels = 0
    for number in range(1 + prompt.seed % 3):
        turn = await policy.generate(messages, tools=TOOLS, max_tokens=12)
        num_vowels += sum(letter in "aeiou" for letter in turn.text)
        messages += [turn.message, {"role": "tool", "content": f"result {number}", "tool_call_id": f"call {number}"}]
        await asyncio.sleep(random.uniform(0, 0.1))
    if prompt.seed % 2:
        await policy.generate([{"role": "user", "content": "another question"}, *messages[1:]], max_tokens=8)
    return 0.0 if int(prompt.prompt_id) % 3 == 0 else num_vowels / 10 + prompt.seed % 9973 / 1e6
'''


def use_program(run: Run, model: Path, folder: Path) -> None:
    """Puts it into the run's config, with a chat model; `folder` gets the program's file."""
    (folder / "program.py").write_text(PROGRAM)
    before = run.config.read_text()
    lines = [line for line in before.splitlines() if not line.startswith(("path =", "chat_template", "name ="))]
    text = "\n".join(lines).replace("[model]", f'[model]\npath = "{model}"')
    text = text.replace("max_response_tokens = 24", "max_response_tokens = 64").replace(
        "[reward]",
        f'program = "python:{folder / "program.py"}:rollout"\n[rollout.options]\nrenderer = "qwen3"\n[reward]',
    )
    run.config.write_text(text)
