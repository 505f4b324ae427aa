"""Many agents in one process: `python -m benchmarks.agents.clients`, one JSON object per rollout on standard input.

Each agent asks, appends the answer and what a tool would return, waits for its environment, and asks again. After its
last turn a JSON object with the seconds of its turns is printed.
"""

import asyncio
import json
import os
import random
import sys
import threading
import time
import traceback
from typing import Any

import aiohttp


async def run_agent(session: aiohttp.ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    """`order`: base_url, num_turns, prompt_words, tool_words, environment_s."""
    draw = random.Random(order["base_url"])
    messages = [{"role": "user", "content": words(draw, order["prompt_words"])}]
    turn_s = []
    for _ in range(order["num_turns"]):
        begun_s = time.monotonic()
        body = {"model": "policy", "messages": messages}
        async with session.post(f"{order['base_url']}/chat/completions", json=body) as answer:
            body = await answer.json()
        assert answer.status == 200, body
        said = body["choices"][0]["message"]
        turn_s.append(round(time.monotonic() - begun_s, 4))
        messages += [said, {"role": "tool", "content": words(draw, order["tool_words"]), "tool_call_id": "1"}]
        await asyncio.sleep(order["environment_s"])
    return {"base_url": order["base_url"], "turn_s": turn_s}


def words(draw: random.Random, number: int) -> str:
    return "".join(f" w{draw.randrange(1000)}" for _ in range(number))


def report(agent: "asyncio.Task[dict[str, Any]]") -> None:
    try:
        print(json.dumps(agent.result()), flush=True)
    except Exception:
        traceback.print_exc()
        os._exit(1)


async def main() -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    running = set()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        while True:
            task = asyncio.create_task(run_agent(session, json.loads(await orders.get())))
            running.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(report)


if __name__ == "__main__":
    asyncio.run(main())
