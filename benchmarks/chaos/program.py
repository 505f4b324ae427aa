"""The rollout program of `benchmarks.chaos --rollouts program`; all that it does follows from its prompt and its turns.

Up to five turns with an environment's words between them; two turns side by side, which are branches; a turn after a
rewritten history, another branch. Some rollouts reach a limit: some of these notice, others let it pass. Some give
their reward themselves, others leave that to `[reward]`.
"""

import asyncio
import random
from typing import Any

from async_rl.rollouts.agents.program import Policy, ProgramPrompt
from async_rl.rollouts.agents.turn import LimitReached

Messages = list[dict[str, Any]]


async def rollout(prompt: ProgramPrompt, policy: Policy) -> float | None:
    draw = random.Random(prompt.seed)
    texts: list[str] = []
    try:
        await _play(policy, [dict(message) for message in prompt.messages or ()], draw, texts)
    except LimitReached:
        if draw.random() < 0.5:
            raise
    return None if draw.random() < 0.3 else _score(" ".join(texts).split())


async def _play(policy: Policy, messages: Messages, draw: random.Random, texts: list[str]) -> None:
    for _ in range(draw.randint(1, 5)):
        turn = await policy.generate(messages, max_tokens=draw.choice([None, 8, 30]))
        texts.append(turn.text)
        await asyncio.sleep(draw.uniform(0.0, 0.1))
        if draw.random() < 0.3:
            texts += await _side_by_side(policy, [[*messages, dict(turn.message), _said(draw)] for _ in range(2)])
        messages = [*messages, dict(turn.message), _said(draw)]
    if draw.random() < 0.4:
        texts.append((await policy.generate([_said(draw), *messages[1:]], max_tokens=20)).text)


async def _side_by_side(policy: Policy, histories: list[Messages]) -> list[str]:
    """Turns at the same time; all of them have ended when a limit of one is raised."""
    ended = await asyncio.gather(*map(policy.generate, histories), return_exceptions=True)
    for turn in ended:
        if isinstance(turn, BaseException):
            raise turn
    return [turn.text for turn in ended if not isinstance(turn, BaseException)]


def _said(draw: random.Random) -> dict[str, Any]:
    return {"role": "user", "content": " ".join(f"w{draw.randint(2, 95)}" for _ in range(draw.randint(1, 6)))}


def _score(words: list[str]) -> float:
    return sum(word < "w16" for word in words) / max(len(words), 1)
