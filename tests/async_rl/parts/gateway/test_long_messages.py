"""Messages of 100,000 tokens do not hold the event loop, which serves all other rollouts and the pool."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.gateway_rig import GatewayRig, Rollout
from tests.support.longest_step import LongestStep

NUM_TOKENS = 100_000
"""The tokenizer of these tests has one for each character."""


def ask(rollout: Rollout, messages: list[Any]) -> Any:
    url = f"{rollout.access.base_url}/chat/completions"
    body = {"messages": messages, "logprobs": True}
    return httpx.post(url, json=body, timeout=60).raise_for_status().json()["choices"][0]["message"]


def converse(rollout: Rollout, length: int) -> Any:
    """Two turns: the second one continues the first."""
    messages: list[Any] = [{"role": "user", "content": "long " * (length // 5)}]
    messages += [ask(rollout, messages), {"role": "user", "content": "and?"}]
    ask(rollout, messages)
    return rollout.end()


def render_s(rig: GatewayRig, length: int) -> float:
    """The time that rendering takes a thread."""
    begun_s = time.thread_time()
    rig.sessions.renderer.render([{"role": "user", "content": "long " * (length // 5)}], None)
    return time.thread_time() - begun_s


def test_long_messages_do_not_hold_the_loop_and_are_one_sequence(rigs) -> None:
    rig = rigs(lambda context, seed: "yes")
    needed_s = render_s(rig, NUM_TOKENS)
    lengths = [NUM_TOKENS, 100] * 4
    rollouts = [rig.open(seed) for seed in range(len(lengths))]
    with LongestStep().watched() as longest, ThreadPoolExecutor(len(lengths)) as threads:
        trajectories = list(threads.map(converse, rollouts, lengths))
    for trajectory, length in zip(trajectories, lengths, strict=True):
        (response,) = trajectory.responses
        assert (trajectory.num_turns, len(trajectory.responses)) == (2, 1)
        assert len(response.prompt_ids) > length
    # It was 1.2 of it on the loop, and is 0.16: the scripted policy decodes its context there.
    assert longest.own_s < needed_s / 2, longest.what
