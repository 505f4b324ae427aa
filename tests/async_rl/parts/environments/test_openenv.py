"""The client of OpenEnv servers: the wire of openenv 0.10, which `test_real_openenv.py` runs, and what breaks it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from async_rl.parts.environments import openenv
from async_rl.parts.environments.failure import EnvironmentFailed
from async_rl.parts.environments.openenv import Environment, open_environment

Serve = Callable[[web.WebSocketResponse], Awaitable[None]]


@asynccontextmanager
async def served(serve: Serve, heartbeat_s: float | None = None) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=heartbeat_s)
        await socket.prepare(request)
        await serve(socket)
        return socket

    app = web.Application()
    app.router.add_get("/ws", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ws"
    finally:
        await runner.cleanup()


def observation(number: int, reward: float | None, done: bool) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"n": number}, "reward": reward, "done": done}})


async def count_to_three(socket: web.WebSocketResponse) -> None:
    number = 0
    async for message in socket:
        asked = json.loads(message.data)
        if asked["type"] == "reset":
            number = asked["data"].get("start", 0)
            await socket.send_str(observation(number, None, False))
        elif asked["type"] == "state":
            assert "data" not in asked, "the server refuses it"
            await socket.send_str(json.dumps({"type": "state", "data": {"step_count": number}}))
        elif asked["data"]["add"] < 0:
            await socket.send_str(
                json.dumps({"type": "error", "data": {"message": "negative", "code": "EXECUTION_ERROR"}})
            )
        else:
            number += asked["data"]["add"]
            await socket.send_str(observation(number, 0.5, number >= 3))


def test_an_episode_has_its_observations_rewards_and_end() -> None:
    async def play() -> None:
        async with served(count_to_three) as url, open_environment(url) as environment:
            for start in (1, 0):
                step = await environment.reset(start=start)
                assert (step.observation, step.reward, step.done) == ({"n": start}, None, False)
                while not step.done:
                    step = await environment.step({"add": 1})
                assert step.observation == {"n": 3} and environment.total_reward == 0.5 * (3 - start)
            assert await environment.state() == {"step_count": 3}

    asyncio.run(play())


def test_an_action_that_is_refused_is_named_and_the_episode_goes_on() -> None:
    async def play() -> None:
        async with served(count_to_three) as url, open_environment(url) as environment:
            await environment.reset()
            with pytest.raises(EnvironmentFailed, match=r"refused a step: 'negative'"):
                await environment.step({"add": -1})
            assert (await environment.step({"add": 3})).done

    asyncio.run(play())


def test_sessions_are_separate() -> None:
    async def play(url: str, start: int) -> float:
        async with open_environment(url) as environment:
            step = await environment.reset(start=start)
            while not step.done:
                step = await environment.step({"add": 1})
            return environment.total_reward

    async def play_all() -> list[float]:
        async with served(count_to_three) as url:
            return await asyncio.gather(*(play(url, start) for start in range(-30, 3)))

    assert asyncio.run(play_all()) == [0.5 * (3 - start) for start in range(-30, 3)]


def test_pings_are_answered_while_the_policy_takes_its_time() -> None:
    async def play() -> None:
        async with served(count_to_three, heartbeat_s=0.1) as url, open_environment(url) as environment:
            await environment.reset()
            await asyncio.sleep(1.0)
            assert (await environment.step({"add": 3})).done

    asyncio.run(play())


def saying(text: str) -> Serve:
    async def serve(socket: web.WebSocketResponse) -> None:
        async for _ in socket:
            await socket.send_str(text)

    return serve


async def full(socket: web.WebSocketResponse) -> None:
    data = {"message": "1 of 1 sessions", "code": "CAPACITY_REACHED"}
    await socket.send_str(json.dumps({"type": "error", "data": data}))
    await socket.close()


async def leaving(socket: web.WebSocketResponse) -> None:
    await socket.receive()
    await socket.close(code=1011, message=b"out of memory")


async def silent(socket: web.WebSocketResponse) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (full, r"refused a reset: '1 of 1 sessions'; raise the server's max_concurrent_envs, or lower rollout"),
        (leaving, r"has closed the connection, at a reset: out of memory"),
        (silent, r"did not respond to a reset within 0\.3 s"),
        (saying("not JSON"), r"responded to a reset with 'not JSON'"),
        (saying("[]"), r"responded to a reset with '\[\]'"),
        (saying('{"type": "state", "data": {}}'), r"responded to a reset with"),
        (saying('{"type": "observation", "data": {}}'), r"without an observation and a reward"),
        (saying(observation(0, None, False).replace("null", '"much"')), r"without an observation and a reward"),
        (saying(observation(0, None, False).replace("null", "true")), r"without an observation and a reward"),
        (saying(observation(0, float("nan"), False)), r"without an observation and a reward"),
        (saying(observation(0, 10**400, False)), r"without an observation and a reward"),
        (saying("[" * 100_000), r"responded to a reset with"),
    ],
)
def test_what_a_server_should_not_say_is_named(serve: Serve, message: str) -> None:
    async def play() -> None:
        timeout_s = 0.3 if serve is silent else 60.0
        async with served(serve) as url, open_environment(url, timeout_s=timeout_s) as environment:
            await environment.reset()

    with pytest.raises(EnvironmentFailed, match=message):
        asyncio.run(play())


def test_a_late_response_is_none_to_the_next_request() -> None:
    async def play(give_up: Callable[[Environment], Awaitable[object]]) -> None:
        is_given_up = asyncio.Event()

        async def late(socket: web.WebSocketResponse) -> None:
            async for _ in socket:
                await is_given_up.wait()
                await socket.send_str(observation(0, 1.0, False))

        async with served(late) as url, open_environment(url, timeout_s=0.3) as environment:
            with pytest.raises((EnvironmentFailed, TimeoutError)):
                await give_up(environment)
            is_given_up.set()
            with pytest.raises(EnvironmentFailed, match="response to a reset is not there yet; open another"):
                await environment.step({"add": 1})

    asyncio.run(play(lambda environment: environment.reset()))
    asyncio.run(play(lambda environment: asyncio.wait_for(environment.reset(), 0.1)))


def test_requests_at_once_are_asked_one_after_the_other() -> None:
    async def play() -> None:
        async with served(count_to_three) as url, open_environment(url) as environment:
            await environment.reset()
            steps = await asyncio.gather(*(environment.step({"add": 1}) for _ in range(3)))
            assert [step.observation["n"] for step in steps] == [1, 2, 3]

    asyncio.run(play())


def test_a_server_that_does_not_close_holds_nobody_up() -> None:
    async def play() -> float:
        async with served(silent) as url:
            async with open_environment(url):
                begun_s = time.monotonic()
            return time.monotonic() - begun_s

    # It takes a second; aiohttp's own limit is 10 s, after which a rollout at its time limit is killed.
    assert asyncio.run(play()) < 9.0


def test_a_server_that_never_answers_a_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "CONNECT_TIMEOUT_S", 0.2)

    async def play() -> None:
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, open_environment(f"ws://127.0.0.1:{port}/ws"):
            raise AssertionError("it has said nothing")

    with pytest.raises(EnvironmentFailed, match=r"no OpenEnv server at .* TimeoutError"):
        asyncio.run(asyncio.wait_for(play(), 10))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/ws", "ws://", "nowhere"])
def test_a_server_that_is_not_there_is_named(url: str) -> None:
    async def play() -> None:
        async with open_environment(url):
            raise AssertionError("there is none")

    with pytest.raises(EnvironmentFailed, match=f"no OpenEnv server at '{url}'"):
        asyncio.run(play())
