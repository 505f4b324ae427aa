"""Serves an environment of verifiers 0.4: `python verifiers_service.py CONFIG SOCKET`; `verifiers` starts it.

It runs in the virtual environment of verifiers and imports nothing of this package. CONFIG is a file as `vf-eval` reads
it, of which `[env]` counts: which taskset, which agents, where they run. One process plays any number of episodes at
once, each against the base URL that it is given.

    GET /tasks?limit=N  lines {"prompt": text or messages, "task": the task's data}, at last possibly {"error": ...}
    POST /episodes      {"task": ..., "base_url": ...}; the response is {"reward": number or null} or {"error": ...}

Its first line on standard output is {} when it listens on SOCKET, or {"error": ...} instead. It ends at SIGTERM, as do
all processes that its agents run in.
"""

import asyncio
import json
import os
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from aiohttp import web

MAX_BODY_BYTES = 64 * 2**20
"""Of a task."""

MAX_SHOWN = 4000
"""Characters of an error."""

SHUTDOWN_S = 1.0
"""How long episodes may go on at the end; then they are cancelled, and clean up."""

MODEL = "policy"
"""Under any name the gateway serves the policy."""

NO_KEY = "ASYNC_RL_NO_KEY"
"""A variable that nobody sets: the key of a rollout is in its base URL."""

Report = Callable[[Mapping[str, str]], None]


class Service:
    """The environment of a config, with the routes that serve it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Raises:
            Exception: verifiers does not accept the config; of any type.
        """
        self._vf = import_module("verifiers.v1")
        loaders = import_module("verifiers.v1.utils.loaders")
        self._env = loaders.load_environment(loaders.resolve_env_config(config))
        self._task_type = type(self._env.taskset).task_type()
        _require_no_retries(self._env.config)

    async def serve(self, socket: str, report: Report) -> None:
        """Serves until SIGTERM; `report` is called when it listens."""
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/tasks", self._list_tasks)
        app.router.add_post("/episodes", self._play)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        async with self._env.serving():
            await runner.setup()
            try:
                await web.UnixSite(runner, socket).start()
                report({})
                await stopped.wait()
            finally:
                await runner.cleanup()

    async def _list_tasks(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            taskset = self._env.taskset
            if "limit" in request.query:
                taskset = taskset.take(int(request.query["limit"]))
            if not taskset.bounded:
                raise ValueError(f"{type(taskset).__name__} is infinite: give a limit")
            for task in taskset:
                await response.write(json.dumps(_row(task.data)).encode() + b"\n")
        except Exception as error:
            await response.write(json.dumps({"error": _shown(error)}).encode() + b"\n")
        await response.write_eof()
        return response

    async def _play(self, request: web.Request) -> web.Response:
        asked = await request.json()
        base_url = asked["base_url"]
        try:
            data = self._task_type.data_type().model_validate(asked["task"])
            task = self._task_type(data, self._env.config.taskset.task)
            client = self._vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
            episode = await self._env.run_episode(task, self._vf.ModelContext(model=MODEL, client=client))
            complete = self._env.complete(episode)
            said = {"reward": _reward(episode, base_url)} if complete else {"error": _faults(episode)}
        except Exception as error:
            said = {"error": _shown(error)}
        return web.json_response(said)


def _row(data: Any) -> dict[str, Any]:
    """
    Raises:
        ValueError: as JSON the data would not be the same.
    """
    task = data.model_dump(mode="json", exclude_defaults=True)
    if type(data).model_validate(json.loads(json.dumps(task))) != data:
        raise ValueError(f"the data of task {data.idx} would not be the same after JSON: {task!r:.500}")
    prompt, system = task.get("prompt", ""), task.get("system_prompt")
    if system is None and prompt:
        return {"prompt": prompt, "task": task}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return {"prompt": messages, "task": task}


def _reward(episode: Any, base_url: str) -> float | None:
    """The reward of the agent that was the policy; None if its task has no rewards.

    Raises:
        ValueError: there is no such agent, or more than one.
    """
    played = [trace for trace in episode.traces if trace.agent.config.client.base_url == base_url]
    if len(played) != 1 or not played[0].agent.trainable:
        names = ", ".join(trace.agent.name + ("" if trace.agent.trainable else " (not trainable)") for trace in played)
        raise ValueError(
            f"{len(played)} runs of agents talked to the policy: {names or 'none'}; expected one that is trainable: a "
            "rollout has one reward. Give all other agents a client and a model of their own in the config"
        )
    (trace,) = played
    if None in trace.rewards.values():
        raise ValueError(f"it was not scored: {trace.stop_condition}")
    return float(trace.reward) if trace.rewards else None


def _faults(episode: Any) -> str:
    faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    texts = [fault.traceback or f"{fault.type}: {fault.message}" for fault in faults]
    return "\n".join(text[-MAX_SHOWN:] for text in texts) or "verifiers does not say why"


def _require_no_retries(config: Any) -> None:
    """
    Raises:
        ValueError: verifiers would play again by itself, and the turns of what failed would be trained as well.
    """
    agents = {name: value.retries for name, value in config if hasattr(value, "retries")}
    for name, retries in {"env": config.retries, **{f"env.{name}": each for name, each in agents.items()}}.items():
        if retries.max_retries or retries.rules:
            raise ValueError(f"{name}.retries is set: leave it out; rollout.options.max_attempts repeats what fails")


def _shown(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-MAX_SHOWN:]


def main(config: str, socket: str) -> None:
    # What the environment prints must not mix with the report.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(said: Mapping[str, str]) -> None:
        print(json.dumps(said), file=stdout, flush=True)

    try:
        service = Service(tomllib.loads(Path(config).read_text()).get("env", {}))
        asyncio.run(service.serve(socket, report))
    except Exception as error:
        # Before it is told: who reads that ends this process.
        traceback.print_exc()
        report({"error": f"{type(error).__name__}: {error}"[:MAX_SHOWN]})
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
