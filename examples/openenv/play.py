"""Rollouts whose environment is a session of an OpenEnv server (`server.py`)."""

import os

from async_rl.parts.environments.openenv import open_environment

URL = os.environ.get("OPENENV_URL", "ws://127.0.0.1:8000/ws")

WORDS = ("<pad>", "<eos>", "<unk>", "number?", "higher", "lower", *map(str, range(1, 8)))
"""The vocabulary of the model of `examples/guess_the_number`."""


async def rollout(prompt, policy):
    context = list(prompt.token_ids)
    async with open_environment(URL) as game:
        step = await game.reset(secret=prompt.row["secret"])
        while not step.done:
            turn = await policy.generate(token_ids=context, max_tokens=1)
            step = await game.step({"word": WORDS[turn.token_ids[0]]})
            context += [*turn.token_ids, WORDS.index(step.observation["answer"])]
        return game.total_reward
