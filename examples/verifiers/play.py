"""Rollouts that are episodes of the environment in `env.toml`."""

import os

from async_rl.parts.environments.verifiers import VerifiersEnvironment

PYTHON = os.environ.get("VERIFIERS_PYTHON", ".venv-verifiers/bin/python")

environment = VerifiersEnvironment("env.toml", PYTHON)


async def rollout(prompt, policy):
    return await environment.play(prompt)
