"""Sessions: limits are outcomes, requests coalesce or are cancelled, and seeds follow from what a turn follows."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from async_rl.config.rollout_section import ProgramOptions
from async_rl.errors import InstanceRefused, NoInstanceLeft
from async_rl.method.types import Prompt
from async_rl.rollouts.agents.messages import InvalidRequest
from async_rl.rollouts.agents.rendering import Renderer, make_renderer
from async_rl.rollouts.agents.session import NothingSampled, RolloutSession, Sessions
from async_rl.rollouts.agents.turn import LimitReached, SessionClosed, Turn
from async_rl.rollouts.groups.text_executor import LONG
from async_rl.rollouts.pool.router import Cached
from tests.support.rollout_settings import rollout_section
from tests.support.scripted_pool import ScriptedPool

HI = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> list[Any]:
    """A list in a list in a list; of 980 of them JSON can be read, and little more."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture
def pool(tokenizer: Any) -> ScriptedPool:
    end = tokenizer.eos_token_id

    def says(context: Sequence[int], seed: int) -> list[int]:
        chance = random.Random(seed)
        return [*(chance.randrange(3, 55) for _ in range(6)), end]

    return ScriptedPool(says, max_model_len=500)


@pytest.fixture
def sessions(pool: ScriptedPool, tokenizer: Any) -> Sessions:
    rollout = rollout_section(max_response_tokens=100, max_turns=8)
    return Sessions(pool, tokenizer, make_renderer("qwen3", tokenizer, "m"), rollout)  # type: ignore[arg-type]


def opened(sessions: Sessions, seed: int = 1, earlier: RolloutSession | None = None, **settings: Any) -> RolloutSession:
    if settings:
        rollout = sessions.rollout.model_copy(update=settings)
        sessions = replace(sessions, rollout=rollout)
    return RolloutSession(sessions, Prompt("row0", (20, 68), {}), "v1", seed, "n", 8.0, earlier)


def run(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(make())


async def limit_of(asking: Coroutine[Any, Any, Turn]) -> str:
    with pytest.raises(LimitReached) as caught:
        await asking
    return caught.value.limit


def test_a_turn_has_what_was_sampled_and_its_message(sessions: Sessions, tokenizer: Any) -> None:
    async def go() -> None:
        session = opened(sessions)
        turn = await session.generate(messages=HI)
        assert tokenizer.decode(turn.prompt_token_ids).endswith("<|im_start|>assistant\n")
        assert turn.message == {"role": "assistant", "content": tokenizer.decode(turn.token_ids[:-1]).strip()}
        assert len(turn.logprobs) == len(turn.token_ids) == 7 and turn.finish_reason == "stop"
        plain = await session.generate(token_ids=[20, 68])
        assert plain.prompt_token_ids == (20, 68) and plain.text
        trajectory = session.finish(0.5, [1.0])
        assert (trajectory.reward, trajectory.turn_rewards, trajectory.status) == (0.5, (1.0,), "completed")
        assert trajectory.num_turns == len(trajectory.responses) == 2 and trajectory.num_tokens == 14
        assert trajectory.last.text == plain.text
        assert [response.prompt_ids is None for response in trajectory.responses] == [True, False]

    run(go)


def test_a_turn_is_asked_for_where_the_one_it_extends_was_generated(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        session = opened(sessions)
        first = await session.generate(messages=HI)
        length = len(first.prompt_token_ids) + len(first.token_ids)
        await session.generate(messages=[*HI, first.message, {"role": "user", "content": "on"}])
        await session.generate(token_ids=[*first.prompt_token_ids, *first.token_ids, 20])
        await session.generate(messages=[{"role": "user", "content": "else"}, first.message, *HI])
        assert pool.cached == [None, Cached("http://scripted", length), Cached("http://scripted", length), None]

    run(go)


def test_seeds_follow_from_content_and_not_from_arrival(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go(order: list[int], seed: int = 1) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        session = opened(sessions, seed)
        turns = await asyncio.gather(*(session.generate(token_ids=[3, i % 2]) for i in order))
        found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for turn in turns:
            found.setdefault(turn.prompt_token_ids, []).append(turn.token_ids)
        return {context: sorted(said) for context, said in found.items()}

    async def compare() -> None:
        one, other = await go([0, 1, 2, 3]), await go([3, 1, 2, 0])
        assert one == other
        assert all(len(set(said)) == 2 for said in one.values()), "asked again, the policy is sampled again"
        assert await go([0, 1], seed=2) != {key: said[:1] for key, said in one.items()}

    run(compare)


async def asked(pool: ScriptedPool, number: int) -> None:
    """Waits until so many requests have reached the pool: a prompt is rendered in a thread before."""
    while len(pool.asked) < number:
        await asyncio.sleep(0.001)


def test_requests_of_one_id_are_one_turn_while_it_is_sampled(sessions: Sessions, pool: ScriptedPool) -> None:
    pool.delay_s = 0.2

    async def go() -> None:
        session = opened(sessions)
        asking = [asyncio.create_task(session.generate(messages=HI, request_id="a")) for _ in range(3)]
        await asked(pool, 1)
        asking[0].cancel()
        first, *others = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError) and others[0] is others[1]
        assert len(pool.asked) == session.num_turns == 1
        again = await session.generate(messages=HI, request_id="a")
        assert again.token_ids != others[0].token_ids and session.num_turns == 2

    run(go)


def test_a_cancelled_turn_leaves_nothing_and_is_sampled_the_same_when_asked_again(
    sessions: Sessions, pool: ScriptedPool
) -> None:
    async def go() -> None:
        pool.delay_s = 30
        session = opened(sessions)
        asking = asyncio.create_task(session.generate(messages=HI))
        await asked(pool, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0)
        assert pool.num_cancelled == 1 and session.num_turns == 0
        pool.delay_s = 0
        turn = await session.generate(messages=HI)
        assert pool.asked[0][1].seed == pool.asked[1][1].seed
        session.retract(turn)
        assert session.num_turns == 0
        assert (await session.generate(messages=HI)).token_ids == turn.token_ids

    run(go)


def test_turns_end_at_their_limit_however_many_ask_at_once(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        session = opened(sessions)
        said = await asyncio.gather(*(session.generate(messages=HI) for _ in range(1000)), return_exceptions=True)
        assert [type(turn) for turn in said] == [Turn] * 8 + [LimitReached] * 992
        assert len(pool.asked) == 8
        assert session.finish().status == "truncated"

    run(go)


def test_tokens_end_at_their_limit_with_what_is_left(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        session = opened(sessions, max_response_tokens=10)
        assert len((await session.generate(messages=HI)).token_ids) == 7
        cut = await session.generate(messages=HI)
        assert len(cut.token_ids) == 3 and cut.finish_reason == "length" and session.limit == "tokens"
        assert await limit_of(session.generate(messages=HI)) == "tokens"
        assert session.finish().status == "truncated"

    run(go)


def test_a_program_that_asks_for_few_tokens_is_not_truncated(sessions: Sessions) -> None:
    async def go() -> None:
        session = opened(sessions)
        assert (await session.generate(messages=HI, max_tokens=2)).finish_reason == "length"
        assert session.finish().status == "completed"

    run(go)


def test_the_context_ends_at_the_models_length(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        pool.max_model_len = 10
        session = opened(sessions)
        assert len((await session.generate(token_ids=[3] * 6)).token_ids) == 4
        assert await limit_of(session.generate(token_ids=[3] * 10)) == "context"
        assert len((await session.generate(token_ids=[3])).token_ids) == 7, "another history has room"
        assert session.finish().status == "truncated"

    run(go)


def test_the_context_may_be_shorter_than_the_model_takes(sessions: Sessions) -> None:
    async def go() -> None:
        session = opened(sessions, options=ProgramOptions(max_context_tokens=10))
        assert len((await session.generate(token_ids=[3] * 6)).token_ids) == 4
        assert await limit_of(session.generate(token_ids=[3] * 10)) == "context"

    run(go)


def test_stop_at_a_limit_wakes_who_waits(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        session = opened(sessions)
        await session.generate(messages=HI)
        pool.delay_s = 30
        asking = [asyncio.create_task(limit_of(session.generate(messages=HI))) for _ in range(3)]
        await asyncio.sleep(0.01)
        session.stop("time")
        assert await asyncio.gather(*asking) == ["time"] * 3
        assert await limit_of(session.generate(messages=HI)) == "time"
        trajectory = session.finish()
        assert trajectory.status == "truncated" and trajectory.num_turns == 1

    run(go)


def test_a_closed_session_gives_nothing_more(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        session = opened(sessions)
        await session.generate(messages=HI)
        pool.delay_s = 30
        asking = asyncio.create_task(session.generate(messages=HI))
        await asked(pool, 2)
        assert session.finish().num_turns == 1
        for waiting in (asking, session.generate(messages=HI)):
            with pytest.raises(SessionClosed):
                await waiting
        assert pool.num_cancelled == 1

    run(go)


def test_a_rollout_without_a_turn_is_refused(sessions: Sessions) -> None:
    async def go() -> None:
        with pytest.raises(NothingSampled, match="before a turn"):
            opened(sessions).finish(1.0)

    run(go)


def test_the_pools_failure_is_the_runs(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        pool.error = NoInstanceLeft("all gone")
        session = opened(sessions)
        with pytest.raises(NoInstanceLeft):
            await session.generate(messages=HI)
        assert session.failed.result() is pool.error and session.num_turns == 0

    run(go)


def test_a_repeated_rollout_meets_the_turns_that_it_had(sessions: Sessions, pool: ScriptedPool) -> None:
    async def go() -> None:
        first = opened(sessions)
        said = [await first.generate(messages=HI) for _ in range(2)]
        first.close()
        pool.says = lambda context, seed: [9, 9, 9]
        second = opened(sessions, earlier=first)
        again = [await second.generate(messages=HI) for _ in range(3)]
        assert [turn.token_ids for turn in again] == [*(turn.token_ids for turn in said), (9, 9, 9)]
        assert len(pool.asked) == 3 and second.finish().num_turns == 3

    run(go)


@pytest.mark.parametrize("order", [(0.0, 0.1), (0.1, 0.0)])
def test_of_turns_at_the_same_time_nothing_depends_on_which_is_faster(
    sessions: Sessions, pool: ScriptedPool, tokenizer: Any, order: tuple[float, float]
) -> None:
    """Also in a repeated rollout, whose turns are there at once: the second is asked after the first has arrived."""

    async def go() -> None:
        session = opened(sessions, max_response_tokens=10)
        turns = []
        for number, delay_s in enumerate(order):
            pool.delay_s = delay_s
            asking = session.generate(token_ids=[3, number], num_known=0)
            turns.append(asyncio.create_task(asking))
            await asked(pool, number + 1)
        said = [len((await turn).token_ids) for turn in turns]
        assert said == [7, 7], "each had all ten tokens"
        assert await limit_of(session.generate(token_ids=[3, 2], num_known=2)) == "tokens"
        assert session.finish().last.text == tokenizer.decode(turns[1].result().token_ids[:-1])

    run(go)


@pytest.mark.parametrize("name", ["template", "qwen3"])
def test_a_text_that_stops_a_turn_cuts_its_tokens(
    sessions: Sessions, pool: ScriptedPool, tokenizer: Any, name: str
) -> None:
    said = tokenizer(["go on. Observation: mine is"], add_special_tokens=False)["input_ids"][0]
    pool.says = lambda context, seed: said

    async def go() -> None:
        session = opened(replace(sessions, renderer=make_renderer(name, tokenizer, "m")))
        turn = await session.generate(messages=HI, stop=["Observation:", "never"])
        assert tokenizer.decode(turn.token_ids) == "go on. Observation:"
        assert turn.text == "go on. " and turn.finish_reason == "stop" and len(turn.logprobs) == len(turn.token_ids)
        messages = [*HI, {"role": "assistant", "content": "go on."}, {"role": "user", "content": "3"}]
        following = await session.generate(messages=messages)
        assert "go on. Observation:<|im_end|>" in tokenizer.decode(following.prompt_token_ids)
        (whole,) = session.finish().responses
        assert whole.weight_versions == {"v1"}

    run(go)


def test_token_ids_that_instances_refuse_are_the_programs_fault(sessions: Sessions, pool: ScriptedPool) -> None:
    pool.error = InstanceRefused("token id 100000 is out of vocabulary", 400)

    async def go() -> None:
        session = opened(sessions)
        with pytest.raises(InvalidRequest, match="out of vocabulary"):
            await session.generate(token_ids=[100_000])
        assert not session.failed.done()
        with pytest.raises(InstanceRefused):
            await session.generate(messages=HI)
        assert session.failed.done(), "what we have rendered ourselves is not"

    run(go)


def test_what_the_renderer_cannot_parse_is_text(sessions: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(sessions.renderer, name)

        def parse(self, *arguments: Any) -> Any:
            raise KeyError("unexpected token")

    async def go() -> None:
        broken = replace(sessions, renderer=Broken())
        assert len((await opened(broken).generate(messages=HI)).text) == 6
        assert "cannot parse" in caplog.text

    run(go)


LARGE = [{"role": "user", "content": "x" * LONG}]


class SlowForLarge:
    """A renderer that renders large messages, one each time that `may_render` is released."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.may_render = threading.Semaphore(0)
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: Sequence[Any], tools: Any) -> tuple[int, ...]:
        size = len(messages[0]["content"])
        self.sizes.append(size)
        if size >= LONG:
            assert self.may_render.acquire(timeout=60)  # only a hang reaches it
        return self._renderer.render([{"role": "user", "content": "x"}], tools)


@pytest.fixture
def slow(sessions: Sessions) -> SlowForLarge:
    return SlowForLarge(sessions.renderer)


def test_large_messages_of_one_rollout_do_not_keep_others_waiting(sessions: Sessions, slow: SlowForLarge) -> None:
    async def go() -> None:
        shared = replace(sessions, renderer=slow)
        heavy = opened(shared)
        heavy_turns = [asyncio.create_task(heavy.generate(messages=LARGE)) for _ in range(8)]
        while not slow.sizes:
            await asyncio.sleep(0.001)
        # All of this while the first of the large ones is being rendered.
        small = [opened(shared, seed) for seed in range(16)]
        for _ in range(3):
            assert len(await asyncio.gather(*(session.generate(messages=HI) for session in small))) == 16
        assert [size for size in slow.sizes if size >= LONG] == [LONG] and not any(t.done() for t in heavy_turns)
        slow.may_render.release(8)
        await asyncio.gather(*heavy_turns)

    run(go)


def test_each_rollout_has_the_same_share_of_the_thread_for_large_messages(
    sessions: Sessions, slow: SlowForLarge
) -> None:
    def large(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "x" * (LONG + number)}]

    async def go() -> None:
        shared = replace(sessions, renderer=slow)
        heavy = opened(shared)
        asking = [asyncio.create_task(heavy.generate(messages=large(0))) for _ in range(6)]
        while not slow.sizes:
            await asyncio.sleep(0.001)
        asking += [asyncio.create_task(opened(shared).generate(messages=large(number))) for number in (1, 2)]
        await asyncio.sleep(0.01)
        slow.may_render.release(8)
        await asyncio.gather(*asking)
        assert [size - LONG for size in slow.sizes] == [0, 1, 2, 0, 0, 0, 0, 0]

    run(go)


def test_messages_that_cannot_fit_are_not_rendered(sessions: Sessions, pool: ScriptedPool, slow: SlowForLarge) -> None:
    async def go() -> None:
        # Of ten letters at most is a token: 500 of them are the model's length.
        session = opened(replace(sessions, renderer=slow, max_letters=10))
        assert await limit_of(session.generate(messages=[{"role": "user", "content": "x" * 5000}])) == "context"
        assert not slow.sizes and session.limit == "context"
        await session.generate(messages=[{"role": "user", "content": "x" * 4990}])
        await session.generate(messages=[{"role": "user", "content": " " * 5000}])
        assert slow.sizes == [4990, 5000]

    run(go)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"messages": HI, "token_ids": [3]},
        {"messages": []},
        {"messages": {"role": "user"}},
        {"token_ids": []},
        {"token_ids": "abc"},
        {"token_ids": [1.5]},
        {"token_ids": [-1]},
        {"token_ids": [True]},
        {"token_ids": [2**40]},
        {"messages": HI, "max_tokens": 0},
        {"messages": HI, "max_tokens": "9"},
        {"messages": [{"role": ["user"], "content": "hi"}]},
        {"messages": [{"role": "user", "content": nested(800)}]},
        {"messages": HI, "tools": nested(980)},
        {"messages": HI, "stop": "x"},
        {"messages": HI, "stop": None},
        {"messages": HI, "stop": [""]},
        {"messages": HI, "tools": "add"},
    ],
)
def test_a_malformed_request_is_refused_and_costs_nothing(
    sessions: Sessions, pool: ScriptedPool, request_: dict[str, Any]
) -> None:
    async def go() -> None:
        session = opened(sessions)
        with pytest.raises(InvalidRequest):
            await session.generate(**request_)
        assert not pool.asked
        await session.generate(messages=HI)
        assert session.finish().status == "completed"

    run(go)
