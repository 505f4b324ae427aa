"""What agents cost the trainer's process: the real producer and gateway, many agents, and instances without a model.

    python -m benchmarks.agents --json

Agents and instances are processes of their own; producer, gateway, sessions, renderer and pool are the real ones. Two
cases:

- many: `--rollouts` agents of `--turns` turns each, all at once; their environments answer at once;
- slow: the same with one group in twenty whose environment takes `--slow-s` per turn.

The last line is one JSON object:

- `cpu_ms_per_turn`: processor time of this process per turn, `turns_per_cpu_s` its inverse;
- `bytes_per_rollout`: growth of resident memory at its peak, with all rollouts in progress, for each of them;
- `longest_step_ms`: the longest time for which a step of the event loop used a processor, and so kept all others
  waiting; `longest_own_ms` without garbage collection, and which step that was; `longest_collection_ms`, the longest
  garbage collection; `longest_step_wall_ms` with the time in which other programs had the core; `p999_step_ms`;
- `turn_p50_s` and `turn_p99_s`, as agents saw them, on a machine that also runs agents and instances;
- `fast_done_s` and `slow_done_s`: when the last group of each kind was complete, in the case slow; `fast_alone_s`: when
  it was complete in the case many.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from async_rl.producer.local import LocalProducer as Producer
from benchmarks.agents.rig import NUM_WORDS, AgentsElsewhere, LongestStep, make_batch, open_producer
from benchmarks.producer.__main__ import peak_bytes, reset_peak_bytes
from benchmarks.producer.mock_instance import Script
from benchmarks.producer.rig import VERSION

SLOW_EVERY = 20


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    script = Script(VERSION, options.turn_tokens, sigma=0.3, first_token_s=0.1, token_s=0.005, vocab_size=NUM_WORDS)
    with open_producer(script, options.rollouts, options.group_size) as (producer, agents):
        take(producer, agents, 0, rows(options, num_groups=4))  # connections and caches
        results = many(producer, agents, options)
        say(f"many: {results}")
        results |= slow(producer, agents, options)
        say(f"slow: {results}")
    return results


def many(producer: Producer, agents: AgentsElsewhere, options: argparse.Namespace) -> dict[str, Any]:
    before, cpu_s = reset_peak_bytes(), time.process_time()
    with LongestStep().watched() as longest:
        done = take(producer, agents, 1, rows(options, options.rollouts // options.group_size))
    cpu_s = time.process_time() - cpu_s
    steps_s = sorted(longest.steps_s)
    turn_s = statistics.quantiles(agents.turn_s, n=100)
    return {
        "turns": len(agents.turn_s),
        "cpu_ms_per_turn": round(1e3 * cpu_s / len(agents.turn_s), 3),
        "turns_per_cpu_s": round(len(agents.turn_s) / cpu_s),
        "bytes_per_rollout": round((peak_bytes() - before) / options.rollouts),
        "longest_step_ms": round(1e3 * longest.cpu_s, 1),
        "longest_own_ms": round(1e3 * longest.own_s, 1),
        "longest_step": longest.what[:300],
        "longest_collection_ms": round(1e3 * longest.collecting_s, 1),
        "longest_step_wall_ms": round(1e3 * longest.wall_s, 1),
        "p999_step_ms": round(1e3 * steps_s[int(0.999 * len(steps_s))], 2),
        "turn_p50_s": round(turn_s[49], 3),
        "turn_p99_s": round(turn_s[98], 3),
        "fast_alone_s": round(max(done.values()), 2),
    }


def slow(producer: Producer, agents: AgentsElsewhere, options: argparse.Namespace) -> dict[str, Any]:
    batch = rows(options, options.rollouts // options.group_size)
    for row in batch[::SLOW_EVERY]:
        row["environment_s"] = options.slow_s
    done = take(producer, agents, 2, batch)
    slow_ones = set(range(0, len(batch), SLOW_EVERY))
    return {
        "fast_done_s": round(max(seconds for index, seconds in done.items() if index not in slow_ones), 2),
        "slow_done_s": round(max(done[index] for index in slow_ones), 2),
    }


def rows(options: argparse.Namespace, num_groups: int) -> list[dict[str, Any]]:
    row = {
        "prompt": "the agent has its own",
        "num_turns": options.turns,
        "prompt_words": options.prompt_tokens,
        "tool_words": options.tool_tokens,
        "environment_s": 0.0,
    }
    return [dict(row) for _ in range(num_groups)]


def take(producer: Producer, agents: AgentsElsewhere, iteration: int, batch: list[dict[str, Any]]) -> dict[int, float]:
    """Rolls out a batch; returns the seconds after which each of its groups was complete."""
    agents.turn_s.clear()
    done: dict[int, float] = {}
    begun_s = time.monotonic()
    with producer.start(make_batch(iteration, batch), VERSION) as run:
        while groups := run.ready(wait=True):
            for group in groups:
                assert all(facts.num_responses == 1 for facts in group.rollouts), "an agent's history is one sequence"
                done[group.index] = time.monotonic() - begun_s
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description="What agents cost.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--rollouts", type=int, default=1000, help="agents at once (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="of each agent (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=500, help="of the first message (default: %(default)s)")
    parser.add_argument(
        "--turn-tokens", type=int, default=200, help="sampled per turn, on average (default: %(default)s)"
    )
    parser.add_argument("--tool-tokens", type=int, default=300, help="of a tool's answer (default: %(default)s)")
    parser.add_argument("--slow-s", type=float, default=10.0, help="of a slow environment (default: %(default)s)")
    options = parser.parse_args()
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    print(json.dumps(measure(options, say)))


if __name__ == "__main__":
    main()
