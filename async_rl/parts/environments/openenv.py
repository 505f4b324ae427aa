"""Environments of OpenEnv servers for rollout programs: their WebSocket protocol, without their packages.

    async def rollout(prompt, policy):
        messages = list(prompt.messages)
        async with open_environment("ws://games:8000/ws") as environment:
            step = await environment.reset(seed=prompt.seed)
            while not step.done:
                messages.append({"role": "user", "content": step.observation["text"]})
                turn = await policy.generate(messages)
                messages.append(turn.message)
                step = await environment.step({"text": turn.text})
            return environment.total_reward

A connection is one episode's session at the server. Requests are `{"type": "reset" | "step" | "state" | "close",
"data": ...}`, responses `{"type": "observation" | "state" | "error", "data": ...}` (openenv 0.10,
`openenv/core/env_server`).
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from async_rl.parts.environments.failure import EnvironmentFailed

CONNECT_TIMEOUT_S = 30.0

REPLY_TIMEOUT_S = 300.0
"""For one step of the environment."""

CLOSE_TIMEOUT_S = 1.0
"""For the server's part of a closing handshake: a rollout at its time limit has two seconds to end."""

MAX_MESSAGE_BYTES = 64 * 2**20

MAX_SHOWN = 500
"""Characters of a response in an error."""


@dataclass(frozen=True, slots=True)
class Step:
    """The state after a reset or a step: what the environment's own observation has, its reward, and its end."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Environment:
    """One episode at a time in one session of a server; made by `open_environment`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout_s: float) -> None:
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s
        self._replies: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self._turnstile = asyncio.Lock()
        """For one request after the other: responses have no number."""
        self._unanswered = ""
        """The request whose response was not awaited to its end: what arrives from then on belongs to no other one."""
        self.total_reward = 0.0
        """The sum of the rewards since the last reset."""

    async def reset(self, **arguments: Any) -> Step:
        """Begins an episode; `arguments` are the environment's, such as `seed`.

        Raises:
            EnvironmentFailed: see there.
        """
        self.total_reward = 0.0
        return self._step(await self._ask("reset", arguments, "observation"))

    async def step(self, action: Mapping[str, Any]) -> Step:
        """Takes an action, in the fields of the environment's own action.

        Raises:
            EnvironmentFailed: see there.
        """
        return self._step(await self._ask("step", action, "observation"))

    async def state(self) -> Mapping[str, Any]:
        """The environment's own state, which may have what an observation hides.

        Raises:
            EnvironmentFailed: see there.
        """
        return await self._ask("state", None, "state")

    async def read(self) -> None:
        """Reads until the connection ends: pings are answered while the policy takes its time."""
        while not self._socket.closed:
            self._replies.put_nowait(await self._socket.receive())

    def _step(self, data: Mapping[str, Any]) -> Step:
        observation, reward = data.get("observation"), data.get("reward")
        if not isinstance(observation, Mapping) or not (reward is None or _is_finite(reward)):
            raise EnvironmentFailed(f"{self._url} responded without an observation and a reward: {_shown(data)}")
        self.total_reward += reward or 0.0
        return Step(observation, None if reward is None else float(reward), bool(data.get("done")))

    async def _ask(self, kind: str, data: Mapping[str, Any] | None, expected: str) -> Mapping[str, Any]:
        request = json.dumps({"type": kind} if data is None else {"type": kind, "data": dict(data)})
        async with self._turnstile:
            message = await self._reply_to(kind, request)
        if message.type is not aiohttp.WSMsgType.TEXT:
            # For the next request.
            self._replies.put_nowait(message)
            raise EnvironmentFailed(f"{self._url} has closed the connection, at a {kind}: {_reason_of(message)}")
        return self._data_of(message.data, kind, expected)

    async def _reply_to(self, kind: str, request: str) -> aiohttp.WSMessage:
        if self._unanswered:
            raise EnvironmentFailed(
                f"{self._url} cannot be asked for a {kind}: its response to a {self._unanswered} is not there yet; "
                "open another environment"
            )
        self._unanswered = kind
        try:
            async with asyncio.timeout(self._timeout_s):
                # A server that is full says so, and closes, before it is asked anything.
                with suppress(ConnectionError, aiohttp.ClientError):
                    await self._socket.send_str(request)
                message = await self._replies.get()
        except TimeoutError as error:
            raise EnvironmentFailed(f"{self._url} did not respond to a {kind} within {self._timeout_s:g} s") from error
        self._unanswered = ""
        return message

    def _data_of(self, text: str, kind: str, expected: str) -> Mapping[str, Any]:
        try:
            reply = json.loads(text)
            found, data = reply["type"], reply["data"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise EnvironmentFailed(f"{self._url} responded to a {kind} with {_shown(text)}") from error
        if found == "error" and isinstance(data, Mapping):
            hint = ""
            if data.get("code") == "CAPACITY_REACHED":
                hint = (
                    "; raise the server's max_concurrent_envs, or lower rollout.options.max_concurrent_per_environment"
                )
            raise EnvironmentFailed(f"{self._url} refused a {kind}: {_shown(data.get('message', data))}{hint}")
        if found != expected or not isinstance(data, Mapping):
            raise EnvironmentFailed(f"{self._url} responded to a {kind} with {_shown(text)}")
        return data


@asynccontextmanager
async def open_environment(url: str, timeout_s: float = REPLY_TIMEOUT_S) -> AsyncIterator[Environment]:
    """A session at the server whose WebSocket is `url`, such as `ws://host:8000/ws`; closed at the end.

    Args:
        timeout_s: for one request.

    Raises:
        EnvironmentFailed: the server cannot be reached.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                socket = await session.ws_connect(
                    url, max_msg_size=MAX_MESSAGE_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S)
                )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EnvironmentFailed(f"no OpenEnv server at {url!r}: {type(error).__name__}: {error}") from error
        environment = Environment(socket, url, timeout_s)
        reader = asyncio.create_task(environment.read(), name=f"reader of {url}")
        try:
            yield environment
        finally:
            reader.cancel()
            await socket.close()


def _reason_of(message: aiohttp.WSMessage) -> str:
    return str(message.extra or message.data or "no reason given")


def _is_finite(value: object) -> bool:
    """Whether it is a number, and no integer that no float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shown(value: object) -> str:
    return f"{value!r:.{MAX_SHOWN}}"
