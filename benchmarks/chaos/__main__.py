"""Fault injection: a real run whose inference pool fails repeatedly, compared with the same run without faults.

    python -m benchmarks.chaos --json [--seed N] [--iterations K] [--minutes M] [--rollouts KIND] [--trainer-kills N]
        [--producer-kills N] [--adapters]

The trainer and instances of the embedded engine are real processes. While they run, instances are killed, stalled,
slowed down, cut off, drained, restarted and added, also in the middle of a publish; twice no instance is left. A proxy
in front of each instance refuses requests, repeats events of its responses, truncates them, delays them until the
trainer has given up on them, and reports false weight versions. Then the same run is repeated on two healthy instances.
As noise depends on the position only, both must train the same tokens and end with the same weights, bit for bit.

The last line is one JSON object; `benchmarks/chaos/report.py` defines the counts. The exit code is 1 if a group was
lost or trained twice, a token of another weight version was trained, a run hung, or the two runs differ.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from async_rl.rollouts.fleet.endpoint import FleetClient
from async_rl.shared.net.free_ports import free_ports
from benchmarks.chaos.controller import Controller
from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.instances import Crew
from benchmarks.chaos.proxy import Disturbance
from benchmarks.chaos.report import is_sound, report
from benchmarks.chaos.rollouts import KINDS, RolloutKind
from benchmarks.chaos.trainer_faults import TrainerFaults
from benchmarks.chaos.trainer_run import REQUEST_TIMEOUT_S, Outcome, TrainerRun, make_inputs
from deploy.cluster.stopping import Stopped, stop_on_signals

SHARED_MEMORY = Path("/dev/shm")
INSTANCES_WITHOUT_FAULTS = 2

FAULTY = Disturbance(
    shares={
        "duplicate": 0.3,
        "late duplicate": 0.02,
        "lie": 0.04,
        "truncate": 0.02,
        "tear": 0.05,
        "hold": 0.06,
        "refuse": 0.04,
        "reset": 0.04,
    },
    pace_s=0.04,
    hold_s=REQUEST_TIMEOUT_S + 1.0,
)
SOUND = Disturbance(shares={}, pace_s=0.0, hold_s=0.0)


async def run_hurt(
    directory: Path,
    rollouts: RolloutKind,
    iterations: int,
    seed: int,
    minutes: float,
    kills: Mapping[str, int],
    log: FaultLog,
    *,
    has_adapters: bool,
) -> Outcome:
    """A run with faults injected into its pool and its own processes for `minutes` at most."""
    (port,) = free_ports(1)
    is_killed = kills["trainer"] > 0
    run = TrainerRun(
        directory, "hurt", rollouts, iterations, seed, port, is_killed=is_killed, has_adapters=has_adapters
    )
    draw = random.Random(seed)
    shares = {kind: share * rollouts.spoil for kind, share in FAULTY.shares.items()}
    crew = _crew(directory, "hurt", rollouts, port, replace(FAULTY, shares=shares), draw, log)
    controller = Controller(
        crew, FleetClient(f"http://127.0.0.1:{port}", None), draw, log, lambda: run.progress, outages=(0.25, 0.7)
    )
    faults = TrainerFaults(run, random.Random(seed), log, rollouts.worker, kills, num_streams=lambda: crew.num_streams)
    try:
        operating = asyncio.create_task(controller.operate())
        injuring = asyncio.create_task(_injure(controller, faults, minutes * 60))
        try:
            return await run.finish()
        finally:
            for task in (injuring, operating):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await controller.close()
    finally:
        await crew.close()


async def run_calm(
    directory: Path, rollouts: RolloutKind, iterations: int, seed: int, *, has_adapters: bool
) -> Outcome:
    """The same run without faults."""
    (port,) = free_ports(1)
    run = TrainerRun(directory, "calm", rollouts, iterations, seed, port, is_killed=False, has_adapters=has_adapters)
    crew = _crew(directory, "calm", rollouts, port, SOUND, random.Random(seed), FaultLog())
    try:
        for _ in range(INSTANCES_WITHOUT_FAULTS):
            await crew.add()
        return await run.finish()
    finally:
        await crew.close()


async def measure(directory: Path, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Both runs, and their figures."""
    rollouts, iterations, seed = KINDS[options.rollouts], options.iterations, options.seed
    make_inputs(directory, iterations)
    log = FaultLog()
    kills = {"trainer": options.trainer_kills, "producer": options.producer_kills}
    has_adapters = options.adapters
    hurt = await run_hurt(directory, rollouts, iterations, seed, options.minutes, kills, log, has_adapters=has_adapters)
    say(f"with faults: {len(hurt.records)} iterations in {hurt.seconds:.1f} s, {log.num_faults} faults")
    calm = await run_calm(directory, rollouts, iterations, seed, has_adapters=has_adapters)
    say(f"without: {len(calm.records)} iterations in {calm.seconds:.1f} s")
    for run in (hurt, calm):
        if run.exit_code != 0:
            print(f"the trainer ended with {run.exit_code}:", *run.last_lines, sep="\n  ", file=sys.stderr)
    return report(iterations, log, hurt, calm)


async def _injure(controller: Controller, faults: TrainerFaults, seconds: float) -> None:
    """The kills of trainer and producer have their places in the run, whatever the time."""

    async def injure_others() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as injuring:
                injuring.create_task(controller.injure())
                injuring.create_task(faults.injure_workers())

    async with asyncio.TaskGroup() as both:
        both.create_task(injure_others())
        both.create_task(faults.kill())


def _crew(
    directory: Path,
    name: str,
    rollouts: RolloutKind,
    port: int,
    disturbance: Disturbance,
    draw: random.Random,
    log: FaultLog,
) -> Crew:
    url, logs = f"http://127.0.0.1:{port}", directory / name / "logs"
    return Crew(directory / "model", url, logs, rollouts.max_model_len, disturbance, draw, log)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="A run under faults, and without.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the faults (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=24, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="how long faults go on at most (default: %(default)s)"
    )
    parser.add_argument(
        "--rollouts", choices=KINDS, default="single-turn", help="what a rollout is (default: %(default)s)"
    )
    parser.add_argument(
        "--trainer-kills", type=int, default=0, help="how often the trainer is killed (default: %(default)s)"
    )
    parser.add_argument(
        "--producer-kills",
        type=int,
        default=0,
        help="how often its producer is killed, which it survives (default: %(default)s)",
    )
    parser.add_argument("--adapters", action="store_true", help="train adapters in place of all weights")
    parser.add_argument(
        "--keep", type=Path, help="a new directory for all files of both runs (default: a temporary one)"
    )
    options = parser.parse_args(arguments)
    stop_on_signals()
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            figures = asyncio.run(measure(directory, options, say))
        except Stopped as stop:
            return stop.exit_code
    print(json.dumps(figures))
    return 0 if is_sound(figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
