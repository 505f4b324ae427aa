"""A run whose pool goes to pieces trains what one without faults does; and the benchmark would notice if it did not."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from async_rl.shared.protocol import routes
from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.proxy import Disturbance, Proxy, Published, Spoil
from benchmarks.chaos.report import MUST_BE_ZERO, is_sound, report
from benchmarks.chaos.trainer_run import PROMPTS_PER_BATCH, RESPONSES_PER_PROMPT, Outcome
from tests.support.make_target import make

NUM_EVENTS = 20


@pytest.mark.distributed
def test_a_run_under_faults_loses_nothing_and_ends_as_one_without() -> None:
    figures = json.loads(make("bench-chaos", "--iterations 6 --seed 3 --minutes 1").splitlines()[-1])
    assert figures["groups_trained"] == figures["groups_expected"] == 6 * PROMPTS_PER_BATCH
    assert not any(figures[key] for key in MUST_BE_ZERO)
    assert figures["weights_equal"] and figures["samples_equal"]
    assert figures["mean_length_with_faults"] == figures["mean_length_without"]
    # Which kinds of faults come up depends on the machine: nobody is injured while no other instance is in service.
    for kind in ("faults", "duplicates_injected", "responses_continued", "recovered"):
        assert figures[kind] > 0, f"{kind} of {figures}"


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_run_of_programs_whose_trainer_and_workers_die_ends_as_one_without() -> None:
    arguments = "--rollouts program --trainer-kills 1 --producer-kills 1 --iterations 4 --seed 3 --minutes 3"
    figures = json.loads(make("bench-chaos", arguments, timeout_s=840).splitlines()[-1])
    assert not any(figures[key] for key in MUST_BE_ZERO)
    assert figures["weights_equal"] and figures["samples_equal"]
    for kind in (
        "trainer_kills",
        "producer_kills",
        "worker_kills",
        "rollouts_repeated",
        "turns",
        "branches",
        "truncated",
    ):
        assert figures[kind] > 0, f"{kind} of {figures}"


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_run_with_adapters_whose_trainer_dies_ends_as_one_without_faults(seed: int) -> None:
    arguments = f"--adapters --trainer-kills 1 --iterations 6 --seed {seed} --minutes 3"
    figures = json.loads(make("bench-chaos", arguments, timeout_s=840).splitlines()[-1])
    assert figures["groups_trained"] == figures["groups_expected"] == 6 * PROMPTS_PER_BATCH
    assert not any(figures[key] for key in MUST_BE_ZERO)
    assert figures["weights_equal"] and figures["samples_equal"]
    assert figures["trainer_kills"] == 1 and figures["faults"] > 1


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Stands for an instance that holds version v1: says so, or streams one token after the other."""
    if request.path == routes.WEIGHT_INFO:
        return web.json_response({"weight_version": "default"})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for i in range(NUM_EVENTS):
        versions = [{"version": "v1", "start": 0, "end": i + 1}]
        event = {"choices": [{"index": 0, "token_ids": [i], "weight_versions": versions}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def proxied(*spoils: Spoil, hold_s: float = 0.0) -> AsyncIterator[tuple[Proxy, FaultLog]]:
    """A proxy that spoils every stream, before a server that answers as above."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    log, published = FaultLog(), Published()
    published.note("v1")
    proxy = Proxy(Disturbance(dict.fromkeys(spoils, 1.0), 0.0, hold_s), random.Random(0), log, published)
    await proxy.start()
    proxy.target = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield proxy, log
    finally:
        await proxy.close()
        await runner.cleanup()


async def ask(proxy: Proxy, path: str = routes.GENERATE, body: str = "{}") -> str:
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(proxy.url + path, data=body) as response:
        return await response.text()


def spoiled(spoil: Spoil) -> tuple[list[dict[str, Any]], FaultLog]:
    """The events of one spoiled stream, without its end."""

    async def get() -> tuple[list[dict[str, Any]], FaultLog]:
        async with proxied(spoil) as (proxy, log):
            events = (await ask(proxy)).split("\n\n")
            return [json.loads(e.removeprefix("data: ")) for e in events if e and "[DONE]" not in e], log

    return asyncio.run(get())


def tokens(events: list[dict[str, Any]]) -> list[int]:
    return [event["choices"][0]["token_ids"][0] for event in events]


@pytest.mark.parametrize("spoil", ["duplicate", "late duplicate"])
def test_a_duplicate_comes_once_more_than_it_was_sent(spoil: Spoil) -> None:
    events, log = spoiled(spoil)
    assert sorted(set(tokens(events))) == list(range(NUM_EVENTS)) and len(events) == NUM_EVENTS + 1
    assert log.count(spoil) == 1


def test_a_lie_names_another_version_for_some_tokens() -> None:
    events, log = spoiled("lie")
    versions = [event["choices"][0]["weight_versions"][0]["version"] for event in events]
    assert tokens(events) == list(range(NUM_EVENTS))
    assert len([version for version in versions if version != "v1"]) == log.count("lie") == 1


def test_a_truncated_answer_lacks_its_end() -> None:
    events, log = spoiled("truncate")
    assert tokens(events) == list(range(len(events))) and len(events) < NUM_EVENTS
    assert log.count("truncate") == 1


def test_a_torn_answer_ends_as_a_lost_connection_does() -> None:
    async def tear() -> int:
        async with proxied("tear") as (proxy, log):
            with pytest.raises(aiohttp.ClientError):
                await ask(proxy)
            return log.count("tear")

    assert asyncio.run(tear()) == 1


def test_a_request_that_is_turned_away_never_begins() -> None:
    async def be_refused() -> str:
        async with proxied("refuse") as (proxy, _):
            return await ask(proxy)

    async def be_reset() -> None:
        async with proxied("reset") as (proxy, _):
            with pytest.raises(aiohttp.ClientError):
                await ask(proxy)
            assert await ask(proxy, routes.WEIGHT_INFO), "control calls pass"

    assert asyncio.run(be_refused()) == "not now"
    asyncio.run(be_reset())


def test_a_cut_proxy_answers_nothing_until_it_is_restored() -> None:
    async def cut() -> str:
        async with proxied() as (proxy, _):
            proxy.cut()
            with pytest.raises(aiohttp.ClientError):
                await ask(proxy)
            proxy.restore()
            return await ask(proxy)

    assert asyncio.run(cut()).endswith("data: [DONE]\n\n")


def test_a_silent_proxy_answers_late() -> None:
    async def be_silent() -> bool:
        async with proxied() as (proxy, _):
            proxy.silence()
            asking = asyncio.create_task(ask(proxy))
            done, _ = await asyncio.wait([asking], timeout=0.3)
            proxy.restore()
            await asking
            return bool(done)

    assert not asyncio.run(be_silent())


def test_a_lying_proxy_says_that_the_newest_version_is_there_until_it_is() -> None:
    async def lie() -> list[str]:
        async with proxied() as (proxy, _):
            proxy.lies_about_version = True
            lying = await ask(proxy, routes.WEIGHT_INFO)
            await ask(proxy, routes.FINISH_WEIGHT_UPDATE, json.dumps({"weight_version": "v2"}))
            return [json.loads(text)["weight_version"] for text in (lying, await ask(proxy, routes.WEIGHT_INFO))]

    assert asyncio.run(lie()) == ["v1", "default"]


def outcome(path: Path) -> Outcome:
    """Of a run of two iterations in which nothing went wrong."""
    save_file({"weight": torch.ones(2)}, path)
    proofs = [
        {
            "iteration": i,
            "prompt_ids": ["0-1", "7", *(f"p{i}-{j}" for j in range(3, PROMPTS_PER_BATCH))],
            "samples": f"digest {i}",
            "fingerprint": f"weights {i}",
            "weight_version": f"v{i}",
            "versions": [f"v{i}"],
            "on_policy": True,
            "num_responses": PROMPTS_PER_BATCH * RESPONSES_PER_PROMPT,
            "num_branches": 0,
            "num_turns": PROMPTS_PER_BATCH * RESPONSES_PER_PROMPT,
            "num_truncated": 0,
            "num_response_tokens": 100,
            "num_continued": 0,
            "num_resampled": 0,
        }
        for i in range(2)
    ]
    return Outcome(proofs, [{}, {}], [], [1.0, 2.0], 0, 0, [], 3.0, path)


def test_two_runs_that_went_well_are_sound(tmp_path: Path) -> None:
    run = outcome(tmp_path / "a")
    assert is_sound(report(2, FaultLog(), run, outcome(tmp_path / "b")))


Spoiler = Callable[[Outcome], Outcome]


def with_proof(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoiler:
    return lambda run: replace(run, proofs=[run.proofs[0], run.proofs[1] | change(run.proofs[1])])


@pytest.mark.parametrize(
    ("key", "value", "spoil"),
    [
        ("groups_lost", PROMPTS_PER_BATCH, lambda run: replace(run, proofs=run.proofs[:1])),
        ("groups_lost", 1, with_proof(lambda proof: {"prompt_ids": [*proof["prompt_ids"][1:], "1"]})),
        ("groups_duplicated", 1, with_proof(lambda proof: {"prompt_ids": [*proof["prompt_ids"], "1"]})),
        ("first_difference", 1, with_proof(lambda proof: {"prompt_ids": ["0-5"]})),
        ("off_policy_tokens_trained", 100, with_proof(lambda proof: {"versions": ["v0", "v1"]})),
        ("off_policy_tokens_trained", 100, with_proof(lambda proof: {"on_policy": False})),
        ("hangs", 1, lambda run: replace(run, num_hangs=1)),
        ("trainers_failed", 1, lambda run: replace(run, exit_code=1)),
        ("first_difference", 1, with_proof(lambda proof: {"samples": "another"})),
        ("first_difference", 1, with_proof(lambda proof: {"fingerprint": "another"})),
    ],
)
def test_what_went_wrong_shows_in_the_figures(tmp_path: Path, key: str, value: int, spoil: Spoiler) -> None:
    figures = report(2, FaultLog(), spoil(outcome(tmp_path / "a")), outcome(tmp_path / "b"))
    assert figures[key] == value
    assert not is_sound(figures)


def test_other_weights_show_in_the_figures(tmp_path: Path) -> None:
    hurt, calm = outcome(tmp_path / "a"), outcome(tmp_path / "b")
    save_file({"weight": torch.tensor([1.0, 1.0 + 1e-7])}, hurt.model_file)
    assert not is_sound(report(2, FaultLog(), hurt, calm))
