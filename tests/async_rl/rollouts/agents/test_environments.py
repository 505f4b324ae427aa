"""Rows that name their environment: a slow one holds up its own groups, limits are kept, and the record names it."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Batch, Group, Prompt
from async_rl.rollouts.agents.program import ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.program_rollouts import make_program_rollouts
from async_rl.rollouts.agents.rollout_figures import MAX_ENVIRONMENTS
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer
from tests.support.parts import needs_part
from tests.support.rollout_settings import rollout_section
from tests.support.scripted_pool import ScriptedPool

WAIT_S = 60.0

Play = Callable[[str], Awaitable[None]]


class Environments:
    """Implements `Program`: one turn, and then `play` with the environment of the row; counts who plays at once."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.playing: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        name = str(prompt.row.get("environment"))
        self.playing[name] += 1
        self.most[name] = max(self.most[name], self.playing[name])
        try:
            await session.generate(token_ids=prompt.token_ids)
            await self.play(name)
        finally:
            self.playing[name] -= 1
        return RolloutResult(1.0)


@pytest.fixture
def make(loop: EventLoopThread, tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Producer]]:
    """`make(environments, records, max_concurrent=4)`: a producer with four rollouts of each prompt."""
    producers: list[Producer] = []

    def made(environments: Environments, records: list[Mapping[str, Any]], **settings: Any) -> Producer:
        options = {"program": "command:true", "renderer": "template", "responses_per_prompt": 4, **settings}
        rollout, reward = rollout_section(**options), make_reward(RewardSection())
        tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model())
        pool: Any = ScriptedPool()
        prompts = PromptsSection(source="x.jsonl", prompts_per_batch=1, chat_template=False)
        programs = make_program_rollouts(rollout, prompts, 1, "m", pool, tokenizer, reward, program=environments)
        producer = Producer(programs, loop, on_figures=records.append)
        producers.append(producer)
        return producer

    yield made
    for producer in producers:
        producer.close()


def batch(environments: list[str | None]) -> Batch:
    rows: list[dict[str, Any]] = [{} if name is None else {"environment": name} for name in environments]
    return Batch(0, {i: Prompt(f"row{i}", (20, 68, i), {"prompt": "?", **row}) for i, row in enumerate(rows)})


def take(producer: Producer, rows: Batch, on_group: Callable[[Group], None] = lambda group: None) -> list[Group]:
    groups: list[Group] = []
    with producer.start(rows, "v1") as run:
        while ready := run.ready(wait=True):
            groups += ready
            for group in ready:
                on_group(group)
    return groups


def test_a_slow_environment_holds_up_its_own_groups_alone_and_is_named(make, loop: EventLoopThread) -> None:
    """The slow one answers when all other groups are there, and its rollouts are the first: else it would never."""
    may_go_on, records = asyncio.Event(), []

    async def play(name: str) -> None:
        if name == "slow":
            await asyncio.wait_for(may_go_on.wait(), WAIT_S)

    async def let_go() -> None:
        may_go_on.set()

    environments = Environments(play)
    names = ["slow", "slow", "fast", "fast", None, None]
    trained: list[str] = []

    def train(group: Group) -> None:
        trained.append(str(group.prompt.row.get("environment")))
        if len(trained) == 4:
            loop.run(let_go())

    producer = make(environments, records, max_concurrent=4, max_concurrent_per_environment=2)
    take(producer, batch(names), train)
    assert sorted(trained[:4]) == ["None", "None", "fast", "fast"] and trained[4:] == ["slow", "slow"]
    assert environments.most["slow"] == 2 and max(environments.most.values()) == 2
    (record,) = records
    assert record["num_rollouts"] == 24 and record["slowest_prompt_id"] in ("row0", "row1")
    assert next(iter(record["environments"])) == "slow"
    assert set(record["environments"]) == {"slow", "fast", "command:true"}
    tails = {name: tail["rollout_s_max"] for name, tail in record["environments"].items()}
    assert tails["slow"] == record["rollout_s_max"] > max(tails["fast"], tails["command:true"])
    assert {tail["num_rollouts"] for tail in record["environments"].values()} == {8}
    json.dumps(record)


def test_without_a_limit_of_its_own_an_environment_may_take_all_slots(make) -> None:
    environments = Environments(lambda name: asyncio.sleep(0.01))
    take(make(environments, [], max_concurrent=4), batch(["one", "two"]))
    assert environments.most["one"] == 4


def test_where_no_row_names_an_environment_the_record_has_none(make) -> None:
    records: list[Mapping[str, Any]] = []
    take(make(Environments(lambda name: asyncio.sleep(0)), records), batch([None, None]))
    assert "environments" not in records[0] and records[0]["slowest_prompt_id"] in ("row0", "row1")


def test_a_record_is_bounded_also_where_each_row_names_another_environment(make) -> None:
    records: list[Mapping[str, Any]] = []
    names = [f"{number}" * 300 for number in range(40)]
    take(make(Environments(lambda name: asyncio.sleep(0)), records, responses_per_prompt=1), batch(names))
    assert len(records[0]["environments"]) == MAX_ENVIRONMENTS and len(json.dumps(records[0])) < 10_000


class Server:
    """An OpenEnv server with room for some sessions, which refuses further ones."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_open = self.num_refused = self.num_played = 0

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open == self.room:
            self.num_refused += 1
            data = {"message": "full", "code": "CAPACITY_REACHED"}
            await socket.send_str(json.dumps({"type": "error", "data": data}))
            await socket.close()
            return socket
        self.num_open += 1
        try:
            async for _ in socket:
                await asyncio.sleep(0.01)
                done = {"observation": {}, "reward": 1.0, "done": True}
                await socket.send_str(json.dumps({"type": "observation", "data": done}))
                self.num_played += 1
        finally:
            self.num_open -= 1
        return socket


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/ws", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ws"
    finally:
        await runner.cleanup()


@needs_part("environments")
def test_an_openenv_server_is_asked_for_no_more_sessions_than_it_has(make, loop: EventLoopThread) -> None:
    from async_rl.parts.environments.openenv import open_environment

    async def play(url: str) -> None:
        async with open_environment(url) as environment:
            assert (await environment.reset()).done

    servers = [Server(room=2), Server(room=2)]
    serving = [listening(server) for server in servers]
    urls = [loop.run(each.__aenter__()) for each in serving]
    try:
        groups = take(make(Environments(play), [], max_concurrent_per_environment=2), batch(urls * 3))
    finally:
        for each in serving:
            loop.run(each.__aexit__(None, None, None))
    assert sum(group.attempts for group in groups) == 6, "nothing was repeated"
    assert [(server.num_refused, server.num_played) for server in servers] == [(0, 12), (0, 12)]
