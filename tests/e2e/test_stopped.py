"""Each process of a run is stopped (SIGSTOP) in each phase, and replaced: the run has the bits of one without a fault.

The reward and the algorithm hold a phase for as long as the test needs; the other phases are looked for.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.fresh_seed import fresh_seed
from tests.support.held_phases import ALGORITHM, HOLDS, REWARD
from tests.support.local_run import EVALUATION, GUARD, Run, command_of
from tests.support.same_run import assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(1200)]

LOST_AFTER_S = 5
TIMEOUT_S = 600
SETTINGS = (
    *("--train.iterations=10", "--train.order=prompt", "--train.exact=true", "--checkpoint.every=1"),
    *("--algorithm.kl_coef=0.05", "--reward.timeout_s=600"),
    *(f"--trainer.lost_after_s={LOST_AFTER_S}", "--publish.transport=snapshot"),
)


class StoppedRun(Run):
    """A run whose phases can be held; `placement` is that of the config."""

    def __init__(self, folder: Path, model: Path, placement: str) -> None:
        super().__init__(folder, model)
        self.folder, self._placement = folder, placement
        self.instance_url: str | None = None
        self.reward.write_text(REWARD + HOLDS)
        (folder / "algorithm.py").write_text(ALGORITHM + HOLDS)
        rows = (folder / "rows.jsonl").read_text().replace("}", ', "held_out": true}')
        (folder / "held_out.jsonl").write_text(rows)
        self.config.write_text(self.config.read_text() + EVALUATION.format(source=folder / "held_out.jsonl"))

    def begin(self) -> None:
        named = f"--algorithm.name=python:{self.folder / 'algorithm.py'}:Holding"
        snapshots = f"--publish.snapshot_dir={self.folder / 'snapshots'}"
        self.start(*SETTINGS, named, snapshots, f"--run.placement={self._placement}")

    def role(self, name: str) -> psutil.Process | None:
        """Its process; None while it is not there."""
        if name == "instance":
            found = [p for p in self.instances() if GUARD not in command_of(p)]
        else:
            found = self.ranks() if name == "rank" else [p for p in self.descendants() if is_producer(p)]
        return found[0] if found else None

    def stop(self, name: str) -> psutil.Process:
        self.wait_until(lambda: self.role(name), pause_s=0.0)
        process = self.role(name)
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        return process


def is_producer(process: psutil.Process) -> bool:
    return "async_rl.producer" in command_of(process)


CLIENT = httpx.Client(verify=False)


def answers(run: StoppedRun, route: str, key: str) -> bool | None:
    """What the instance says of itself; None while it is started again. It takes a millisecond: phases are short."""
    try:
        if run.instance_url is None and (instance := run.role("instance")) is not None:
            words = command_of(instance)
            run.instance_url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        return bool(CLIENT.get(f"{run.instance_url}{route}").json()[key])
    except (ValueError, httpx.TransportError):
        run.instance_url = None
        return None


LOOKED_FOR: dict[str, Callable[[StoppedRun], bool]] = {
    "generate": lambda run: any(member.num_requests for member in run.members()),
    "publish": lambda run: answers(run, "/is_paused", "is_paused") is True,
    "checkpoint": lambda run: any((run.dir / "checkpoints").glob("*.partial")),
    "sleep": lambda run: answers(run, "/is_sleeping", "is_sleeping") is True,
    "wake": lambda run: answers(run, "/is_sleeping", "is_sleeping") is False,
}
HELD = ("score", "train", "evaluate")
ROLES = ("rank", "producer", "instance")
CASES = [
    *(("separate", phase) for phase in ("generate", *HELD, "publish", "checkpoint")),
    *(("turns", phase) for phase in ("train", "sleep", "wake")),
]


def look_for(run: StoppedRun, phase: str) -> None:
    run.wait_until(lambda: LOOKED_FOR[phase](run), pause_s=0.0)


def stop_in_phase(run: StoppedRun, role: str, phase: str, after: int) -> psutil.Process:
    """Stops it once so many iterations are trained, in the next such phase; what held the phase goes on."""
    run.wait_for_iterations(after)
    if phase in HELD:
        held = run.folder / f"held-{phase}"
        held.with_name(f"hold-{phase}").touch()
        run.wait_until(held.exists)
        stopped = run.stop(role)
        held.unlink()
        return stopped
    if phase == "wake":
        look_for(run, "sleep")
    look_for(run, phase)
    return run.stop(role)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[StoppedRun]:
    run = StoppedRun(tmp_path_factory.mktemp("undisturbed"), tiny_model("qwen3", tied=True), "separate")
    run.begin()
    assert run.finish() == 0, run.everything_said()
    yield run


@pytest.fixture
def begun(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Callable[[str], StoppedRun]]:
    runs: list[StoppedRun] = []

    def begin(placement: str) -> StoppedRun:
        runs.append(StoppedRun(tmp_path, tiny_model("qwen3", tied=True), placement))
        runs[-1].begin()
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.mark.parametrize(("placement", "phase"), CASES, ids=["-".join(case) for case in CASES])
def test_each_process_that_is_stopped_in_a_phase_is_replaced_and_the_run_trains_the_same_bits(
    placement: str, phase: str, undisturbed: StoppedRun, begun: Callable[[str], StoppedRun]
) -> None:
    """One after the other, in an order drawn anew."""
    run = begun(placement)
    for count, role in enumerate(random.Random(fresh_seed()).sample(ROLES, k=len(ROLES))):
        stopped = stop_in_phase(run, role, phase, after=2 + 2 * count)
        began_s = time.monotonic()
        run.wait_until(partial(is_gone, stopped), TIMEOUT_S)
        print(f"{placement}, {role} stopped in {phase}: replaced {time.monotonic() - began_s:.0f} s later")
    require_same_run(run, undisturbed)


@pytest.mark.cold  # Warm processes have their names before they are processes of their own.
@pytest.mark.parametrize("role", ["rank", "producer"])
def test_a_process_that_is_stopped_before_anything_is_trained_is_replaced(
    role: str, undisturbed: StoppedRun, begun: Callable[[str], StoppedRun]
) -> None:
    run = begun("separate")
    stopped = run.stop(role)
    require_same_run(run, undisturbed)
    assert is_gone(stopped)


@pytest.mark.cold
def test_an_instance_that_is_stopped_while_it_starts_ends_a_run_that_has_trained_nothing(
    begun: Callable[[str], StoppedRun],
) -> None:
    run = begun("separate")
    stopped = run.stop("instance")
    assert run.finish(TIMEOUT_S) == 1 and "ProcessFailed: instance-0 " in (said := run.everything_said()), said
    assert "was stopped by a signal for more than 35 s" in said
    assert is_gone(stopped)


def require_same_run(run: StoppedRun, undisturbed: StoppedRun) -> None:
    """It ends well, with everything that the undisturbed one has."""
    assert run.finish(TIMEOUT_S) == 0, run.everything_said()
    # Those of a producer that is lost before it has written them are not made again: docs/independent_pools.md.
    num_unsampled = len(run.lines("metrics.jsonl")) - len({row["iteration"] for row in run.lines("samples.jsonl")})
    assert num_unsampled <= 1
    assert_same_run(run, undisturbed, num_unsampled)
