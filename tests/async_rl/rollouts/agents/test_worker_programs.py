"""Rollout programs in processes of their own: their turns, limits and results; what else harms nobody is in
`workers/test_worker.py`."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import ConfigError, NoInstanceLeft
from async_rl.method.types import Prompt
from async_rl.rollouts.agents import worker_programs
from async_rl.rollouts.agents.program import ProgramFailed, ProgramInterrupted, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.rendering import TemplateRenderer
from async_rl.rollouts.agents.session import RolloutSession, SessionClosed, Sessions
from async_rl.rollouts.agents.worker_programs import WorkerProgram, program_worker, run_program
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.workers.worker import NotLoaded, Worker
from tests.support.scripted_pool import ScriptedPool

pytestmark = pytest.mark.distributed

PROGRAM = """
import asyncio, os, time

from async_rl.rollouts.agents.program import RolloutResult
from async_rl.rollouts.agents.turn import LimitReached, SessionClosed

kept = []
lent = []

async def rollout(prompt, policy):
    return await globals()[prompt.row["does"]](prompt, policy)

async def two_turns(prompt, policy):
    messages = list(prompt.messages)
    for _ in range(2):
        turn = await policy.generate(messages)
        messages += [turn.message, {"role": "user", "content": "and"}]
    return float(prompt.row.get("reward", 0.5))

async def turn_rewards(prompt, policy):
    await policy.generate(prompt.messages)
    return RolloutResult(1.5, (1.0, 0.5))

async def asks_with_other_types(prompt, policy):
    for token_ids in ("ab", [1.5], [True, 1], 3, [None]):
        try:
            await policy.generate(token_ids=token_ids)
        except ValueError as error:
            assert type(error).__name__ == "InvalidRequest" and "expected a list of integers" in str(error), error
        else:
            raise AssertionError(token_ids)
    import numpy

    await policy.generate(token_ids=numpy.array([3, 4]))
    return 0.75

async def raises(prompt, policy):
    await policy.generate(prompt.messages)
    raise KeyError("broken tool")

async def exits_at_once(prompt, policy):
    await policy.generate(prompt.messages)
    os._exit(7)

async def hangs(prompt, policy):
    await policy.generate(prompt.messages)
    time.sleep(3600)

async def sleeps(prompt, policy):
    await policy.generate(prompt.messages)
    await asyncio.sleep(3600)

async def notices_the_end(prompt, policy):
    await policy.generate(prompt.messages)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return 0.25

async def floods(prompt, policy):
    said = await asyncio.gather(*(policy.generate(prompt.messages) for _ in range(1000)), return_exceptions=True)
    assert sum(isinstance(turn, LimitReached) for turn in said) == 1000 - 16, said
    return 1.0

async def asks_for_ever(prompt, policy):
    while True:
        try:
            await policy.generate("no messages")
        except ValueError:
            pass

async def never_stops(prompt, policy):
    while True:
        await policy.generate(prompt.messages)

async def wraps_the_limit(prompt, policy):
    async with asyncio.TaskGroup() as group:
        group.create_task(never_stops(prompt, policy))

async def returns_nan(prompt, policy):
    await policy.generate(prompt.messages)
    return float("nan")

async def causes_in_a_circle(prompt, policy):
    await policy.generate(prompt.messages)
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    raise first

async def prints_much(prompt, policy):
    await policy.generate(prompt.messages)
    for _ in range(200):
        print("x" * 10**6)
    return 1.0

async def keeps_the_policy(prompt, policy):
    kept.append(policy)
    await policy.generate(prompt.messages)
    return 1.0

async def uses_a_kept_policy(prompt, policy):
    await policy.generate(prompt.messages)
    try:
        await kept[0].generate(prompt.messages)
    except SessionClosed:
        return 2.0

async def uses_the_policy_of_another(prompt, policy):
    if not lent:
        lent.append(policy)
        await policy.generate(prompt.messages)
        await asyncio.sleep(0.5)
        return 1.0
    try:
        await lent[0].generate(prompt.messages)
    except SessionClosed:
        return 2.0

async def from_a_thread(prompt, policy):
    loop = asyncio.get_running_loop()
    def agent():
        asyncio.run_coroutine_threadsafe(policy.generate(prompt.messages), loop).result()
        return 1.0
    return await asyncio.to_thread(agent)
"""


class Runs:
    """Runs rollouts in one process, at a scripted policy."""

    def __init__(self, loop: EventLoopThread, worker: Worker, tokenizer: Any) -> None:
        self.loop = loop
        self.worker = worker
        self.pool = ScriptedPool()
        rollout = RolloutSection(max_response_tokens=200, program="python:x.py:rollout")
        self.sessions = Sessions(self.pool, tokenizer, TemplateRenderer(tokenizer), rollout)

    def open(self, seed: int = 1) -> RolloutSession:
        return RolloutSession(self.sessions, Prompt("row0", (20, 68), {}), "v1", seed, "n", 8.0)

    async def run(
        self, does: str, session: RolloutSession | None = None, timeout_s: float = 30.0, **row: Any
    ) -> RolloutResult:
        prompt = ProgramPrompt(
            prompt_id="row0",
            token_ids=(20, 68),
            row={"does": does, **row},
            messages=[{"role": "user", "content": "hi"}],
            seed=1,
        )
        return await run_program(self.worker, prompt, session or self.open(), timeout_s)

    def __call__(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.loop.run(make(), 240)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return f"python:{path}:rollout"


@pytest.fixture(scope="module")
def process(program: str) -> Iterator[tuple[EventLoopThread, Worker]]:
    """One process for all tests: each program meets what those before it left."""
    loop, process = EventLoopThread(), program_worker(program)
    yield loop, process
    loop.run(process.close())
    loop.close()


@pytest.fixture
def runs(process: tuple[EventLoopThread, Worker], tokenizer: Any) -> Runs:
    """Its process runs: it is started again if a test before has ended it."""
    runs = Runs(*process, tokenizer)
    if not runs.worker.running:
        runs.loop.run(runs.worker.start(240))
    return runs


async def outcome(running: Awaitable[RolloutResult]) -> Any:
    try:
        return await running
    except Exception as error:
        return error


def test_a_program_takes_turns_and_gives_a_reward(runs: Runs) -> None:
    async def go() -> None:
        session = runs.open()
        assert await runs.run("two_turns", session, reward=0.75) == RolloutResult(0.75)
        trajectory = session.finish(0.75)
        assert trajectory.num_turns == 2 and trajectory.status == "completed"
        assert await runs.run("turn_rewards") == RolloutResult(1.5, (1.0, 0.5))
        assert await runs.run("from_a_thread") == RolloutResult(1.0)
        assert await runs.run("asks_with_other_types") == RolloutResult(0.75)

    runs(go)


def test_rollouts_of_one_process_run_at_the_same_time(runs: Runs) -> None:
    runs.pool.delay_s = 3600.0

    async def go() -> None:
        running = [asyncio.create_task(runs.run("two_turns", runs.open(seed), 3600.0)) for seed in range(50)]
        while len(runs.pool.asked) < 50:
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    runs(go)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raises", "broken tool"),
        ("returns_nan", "it returned nan as a reward"),
        ("causes_in_a_circle", "KeyError: 'first'"),
        ("asks_for_ever", "it asked for a turn 100 times in vain"),
        ("exits_at_once", r"exit code 7\) while it ran"),
    ],
)
def test_a_fault_is_that_of_its_rollout_alone(
    runs: Runs, does: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes half a minute for 10,000.
    monkeypatch.setattr(worker_programs, "MAX_REFUSED", 100)

    async def go() -> tuple[Any, Any]:
        beside = asyncio.create_task(outcome(runs.run("sleeps", timeout_s=3600)))
        await asyncio.sleep(0.2)
        failed = await outcome(runs.run(does))
        if runs.worker.running:
            assert not beside.done()
            assert await runs.run("two_turns") == RolloutResult(0.5)
            beside.cancel()
            return failed, None
        return failed, await beside

    failed, beside = runs(go)
    assert isinstance(failed, ProgramFailed), failed
    assert str(failed).count("\n") < 40
    assert re.search(message, str(failed)), str(failed)
    assert beside is None or isinstance(beside, ProgramInterrupted)


def test_a_program_that_does_not_end_is_killed_and_others_are_interrupted(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_programs, "END_GRACE_S", 0.5)

    async def go() -> tuple[Any, Any, RolloutSession]:
        session = runs.open()
        beside = asyncio.create_task(outcome(runs.run("sleeps", timeout_s=3.2)))
        ended = await outcome(runs.run("hangs", session, timeout_s=3.0))
        return ended, await beside, session

    ended, beside, session = runs(go)
    assert ended == RolloutResult() and session.limit == "time"
    assert session.finish().status == "truncated", "it keeps the turn that it had"
    assert isinstance(beside, ProgramInterrupted), "the time of the other one is not its own"
    assert not runs.worker.running


@pytest.mark.parametrize(("does", "reward"), [("sleeps", None), ("notices_the_end", 0.25)])
def test_time_is_a_limit_at_which_a_program_may_still_give_a_reward(runs: Runs, does: str, reward: float) -> None:
    async def go() -> tuple[RolloutResult, RolloutSession]:
        session = runs.open()
        return await runs.run(does, session, timeout_s=2.0), session

    result, session = runs(go)
    assert result.reward == reward
    assert session.finish(result.reward).status == "truncated"
    assert runs.worker.running


@pytest.mark.parametrize("does", ["never_stops", "wraps_the_limit"])
def test_a_limit_that_a_program_lets_pass_is_an_outcome(runs: Runs, does: str) -> None:
    async def go() -> tuple[RolloutResult, RolloutSession]:
        session = runs.open()
        return await runs.run(does, session), session

    result, session = runs(go)
    assert result == RolloutResult() and session.limit in ("turns", "tokens")
    assert session.finish().status == "truncated"


@pytest.mark.parametrize("does", ["floods", "prints_much"])
def test_these_do_no_harm_at_all(runs: Runs, does: str) -> None:
    async def go() -> tuple[Any, Any]:
        return await runs.run(does, timeout_s=30), await runs.run("two_turns")

    assert runs(go) == (RolloutResult(1.0), RolloutResult(0.5))


def test_a_policy_that_was_kept_is_of_no_use(runs: Runs) -> None:
    async def go() -> RolloutResult:
        await runs.run("keeps_the_policy")
        return await runs.run("uses_a_kept_policy")

    assert runs(go) == RolloutResult(2.0)


def test_a_turn_of_a_rollout_that_ends_meanwhile_is_an_error_at_once(runs: Runs) -> None:
    async def go() -> list[RolloutResult]:
        first = asyncio.create_task(runs.run("uses_the_policy_of_another"))
        while not runs.pool.asked:
            await asyncio.sleep(0.01)
        runs.pool.delay_s = 1.0
        return await asyncio.gather(first, runs.run("uses_the_policy_of_another", timeout_s=10))

    assert runs(go) == [RolloutResult(1.0), RolloutResult(2.0)]


def test_a_failing_pool_ends_the_rollout_with_its_error(runs: Runs) -> None:
    runs.pool.error = NoInstanceLeft("all gone")

    async def go() -> Any:
        return await outcome(runs.run("two_turns"))

    assert runs(go) is runs.pool.error


def test_a_cancelled_rollout_ends_and_so_do_its_turns(runs: Runs) -> None:
    runs.pool.delay_s = 30

    async def go() -> None:
        session = runs.open()
        running = asyncio.create_task(runs.run("two_turns", session))
        while not runs.pool.asked:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        session.close()
        while not runs.pool.num_cancelled:
            await asyncio.sleep(0.01)
        with pytest.raises(SessionClosed):
            await session.generate(token_ids=[3])

    runs(go)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "no_such_module"),
        ("def rollout(prompt, policy): pass", "not asynchronous"),
    ],
)
def test_a_program_that_cannot_be_loaded_says_why(
    loop: EventLoopThread, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "program.py").write_text(text)
    process = program_worker(f"python:{tmp_path / 'program.py'}:rollout")
    with pytest.raises(NotLoaded, match=message):
        loop.run(process.start(240))
    assert not process.running


def test_a_program_that_changes_during_the_run_is_not_loaded_again(loop: EventLoopThread, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("async def rollout(prompt, policy): ...")
    program = WorkerProgram(RolloutSection(program=f"python:{file}:rollout"))

    async def go() -> None:
        try:
            await program.start()
            file.write_text("async def rollout(prompt, policy): return 1.0")
            await program.start()
            program._pool.workers[0].kill()
            with pytest.raises(ConfigError, match="its file has changed since the run began"):
                await program.start()
        finally:
            await program.close()

    loop.run(go(), 60)
